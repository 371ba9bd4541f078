"""The part of the stand-in for the Hub that takes uploads, see `hub_server`."""

import base64
import hashlib
import json
from pathlib import Path


class UploadAnswers:
    """Answers of a request handler whose `hub` has a folder to store in."""

    def takes_upload(self, parts: list[str], received: bytes) -> bool:
        """Answer what belongs to an upload; False where the request is another one."""
        if self.command == "PUT" and parts[0] == "lfs":  # the address is the permission
            matches = hashlib.sha256(received).hexdigest() == parts[1]
            self._store_large(parts[1]).write_bytes(received)
            self._send(200 if matches else 400, b"", {})
            return True
        answers = {
            ("api", "whoami-v2"): self._answer_whoami,
            ("api", "validate-yaml"): self._answer_card,
            ("api", "repos", "create"): self._create,
        }
        answer = answers.get(tuple(parts))
        if answer is None and self.command == "POST":
            if parts[:2] == ["api", "models"] and parts[4:5] == ["preupload"]:
                answer = self._answer_preupload
            elif parts[:2] == ["api", "models"] and parts[4:5] == ["commit"]:
                answer = self._commit
            elif parts[2:] == ["info", "lfs", "objects", "batch"]:
                answer = self._answer_large
        if answer is None:
            return False
        if self._is_logged_in():
            answer(parts, received)
        else:
            self._fail(401, "Unauthorized", "Invalid username or password.")
        return True

    def _answer_whoami(self, parts: list[str], received: bytes) -> None:
        token = {"type": "access_token", "accessToken": {"role": self.hub.role}}
        orgs = [{"name": name, "roleInOrg": "write"} for name in self.hub.organisations]
        self._send_json({"type": "user", "name": self.hub.account, "orgs": orgs, "auth": token})

    def _answer_card(self, parts: list[str], received: bytes) -> None:
        faults = [{"message": message} for message in self.hub.card_faults]
        self._send_json({"errors": faults, "warnings": []}, 400 if faults else 200)

    def _create(self, parts: list[str], received: bytes) -> None:
        wanted = json.loads(received)
        repo_id = f"{wanted.get('organization') or self.hub.account}/{wanted['name']}"
        if repo_id in self.hub.repos:
            self._fail(409, "Conflict", "You already created this model repo")
            return
        assert self.hub.storage is not None
        folder = self.hub.storage / "repositories" / repo_id
        folder.mkdir(parents=True)
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
        private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.hub.add(repo_id, folder, private=private)
        self._send_json({"url": f"{self.hub.url}/{repo_id}", "name": repo_id})

    def _answer_preupload(self, parts: list[str], received: bytes) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(self.hub.large) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(received)["files"]
        ]
        self._send_json({"files": files})

    def _answer_large(self, parts: list[str], received: bytes) -> None:
        objects = [
            {
                "oid": wanted["oid"],
                "size": wanted["size"],
                "actions": {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}},
            }
            for wanted in json.loads(received)["objects"]
        ]
        self._send_json({"transfer": "basic", "objects": objects})

    def _commit(self, parts: list[str], received: bytes) -> None:
        repo = self.hub.repos["/".join(parts[2:4])]
        for line in received.splitlines():
            step = json.loads(line)
            value = step["value"]
            if step["key"] == "header":
                repo.commits.append(value["summary"])
                continue
            path = repo.folder / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if step["key"] == "deletedFile":
                path.unlink()
            elif step["key"] == "file":
                path.write_bytes(base64.b64decode(value["content"]))
            else:
                path.write_bytes(self._store_large(value["oid"]).read_bytes())
        page = f"{self.hub.url}/{'/'.join(parts[2:4])}/commit/{repo.commit}"
        self._send_json({"commitUrl": page, "commitOid": repo.commit})

    def _store_large(self, oid: str) -> Path:
        assert self.hub.storage is not None
        folder = self.hub.storage / "large"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / oid

    def _send_json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})
