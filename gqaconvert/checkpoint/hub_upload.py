"""Finished checkpoints to the Hugging Face Hub; what could refuse an upload is asked beforehand.

`check_upload` needs no files and leaves nothing on the Hub; `upload_checkpoint` makes the
repository and sends a folder. Tokens are left to `huggingface_hub`, and its messages are not
repeated: they may hold signed addresses.
"""

from __future__ import annotations

import glob
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gqaconvert.checkpoint.hub_errors import HubUnreachable, hub_address
from gqaconvert.checkpoint.staging import MANIFEST
from gqaconvert.errors import CheckpointError, GqaconvertError, RefusedError, UsageError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_LOGIN = "hf auth login"
_LOG_IN_TO_WRITE = f"{_LOGIN}, with a token that may write"
_MADE_BY_THE_HUB = frozenset({".gitattributes"})


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """A repository of the Hub that may be written to.

    Attributes:
        repo_id: owner/name.
        private: whether only its owner sees it.
        exists: it is there already, empty or with a model that gqaconvert made.
        replaces: it holds a model, which a new commit will replace; its history keeps it.
        url: of its page.
    """

    repo_id: str
    private: bool
    exists: bool
    replaces: bool
    url: str

    def describe(self) -> str:
        """Say in words where an upload goes."""
        who = "private" if self.private else "public"
        what = "replacing what it holds" if self.replaces else "empty" if self.exists else "new"
        return f"{self.url} ({who}, {what})"


def check_upload(repo_id: str, *, public: bool, overwrite: bool) -> UploadTarget:
    """Find out whether a checkpoint may be uploaded, before there is one.

    Args:
        repo_id: owner/name, or a name of whoever is logged in.
        public: let everybody see the repository.
        overwrite: replace a model that gqaconvert uploaded earlier.

    Raises:
        UsageError: not a name that the Hub allows.
        RefusedError: the repository holds something, or is public and `public` was not asked for.
        HubUnreachable: offline, or no answer.
        GqaconvertError: nobody is logged in, or not with the right to write there.
    """
    from huggingface_hub import HfApi, constants

    _check_name(repo_id)
    if constants.HF_HUB_OFFLINE:
        raise HubUnreachable(
            "HF_HUB_OFFLINE is set, so nothing can be uploaded",
            at=repo_id,
            remedy="unset HF_HUB_OFFLINE, or leave --push-to-hub out",
        )
    api = HfApi()
    full_name = _writable_name(api, repo_id)
    url = f"{hub_address()}/{full_name}"
    found = _find_repository(api, full_name)
    if found is None:
        return UploadTarget(full_name, not public, exists=False, replaces=False, url=url)
    names, private = found
    _check_existing(full_name, names, private=private, public=public, overwrite=overwrite)
    return UploadTarget(full_name, private, exists=True, replaces=bool(names), url=url)


def files_to_upload(folder: Path) -> dict[str, int]:
    """Return the files of a finished checkpoint by their path in it, with their bytes.

    Hidden files and folders belong to other programs and stay here.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in paths
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def upload_command(folder: Path, target: UploadTarget) -> str:
    """Return the command that uploads a folder again, after a failure."""
    words = ["hf", "upload", target.repo_id, str(folder), "."]
    words += ["--private"] if target.private else []
    words += ["--delete", "*"] if target.replaces else []
    return shlex.join(words)


def upload_checkpoint(folder: Path, target: UploadTarget, *, message: str) -> tuple[str, ...]:
    """Upload a finished checkpoint; files that the repository holds and the folder lacks go away.

    Args:
        folder: with gqaconvert.json, which marks it as finished.
        target: what `check_upload` returned.
        message: of the commit.

    Returns:
        What the Hub warns of, such as unusual metadata in the card.

    Raises:
        GqaconvertError: anything that went wrong, with the command that tries again; the folder is
            as it was.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"not a finished output: it has no {MANIFEST}", at=str(folder))
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi()
    with _explained(target.repo_id, again=upload_command(folder, target)), _collected() as noted:
        if not target.exists:
            api.create_repo(target.repo_id, private=target.private)
        # Resumed by repeating it; huggingface_hub 2 has no upload_large_folder any more.
        api.upload_folder(
            repo_id=target.repo_id,
            folder_path=folder,
            commit_message=message,
            allow_patterns=[glob.escape(name) for name in files_to_upload(folder)],
            delete_patterns="*" if target.replaces else None,
        )
    return tuple(noted)


def _check_name(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(
            "not a name for a repository on the Hub",
            at=repo_id or "--push-to-hub",
            remedy="owner/name, or a name of your own: letters, digits and single . - _ in between",
        ) from error


def _writable_name(api: HfApi, repo_id: str) -> str:
    """Return owner/name, and refuse where the login is known not to suffice."""
    from huggingface_hub.errors import LocalTokenNotFoundError

    try:
        with _explained(repo_id):
            account: Mapping[str, Any] = api.whoami()
    except LocalTokenNotFoundError as error:
        raise GqaconvertError(
            "nobody is logged in to the Hub", at=repo_id, remedy=_LOGIN
        ) from error
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise GqaconvertError("the token may only read", at=repo_id, remedy=_LOG_IN_TO_WRITE)
    owner, _, name = repo_id.rpartition("/")
    own = str(account.get("name", ""))
    if not owner:
        return f"{own}/{name}"
    known = {own.lower(), *(str(each.get("name", "")).lower() for each in account.get("orgs", ()))}
    # A fine-grained token need not name all organisations it may write to.
    if role == "write" and owner.lower() not in known:
        raise GqaconvertError(
            f"the account that is logged in is not, and not a member of, {owner}",
            at=repo_id,
            remedy=f"{name} alone for your own account, or {_LOGIN} with another one",
        )
    return repo_id


def _find_repository(api: HfApi, repo_id: str) -> tuple[frozenset[str], bool] | None:
    """Return the files of a repository and whether it is private; None if there is none."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        with _explained(repo_id):
            found = api.model_info(repo_id, timeout=10)
    except RepositoryNotFoundError:
        return None
    names = frozenset(file.rfilename for file in found.siblings or ())
    return names - _MADE_BY_THE_HUB, bool(found.private)


def _check_existing(
    repo_id: str, names: frozenset[str], *, private: bool, public: bool, overwrite: bool
) -> None:
    if not private and not public:
        raise RefusedError(
            "this repository exists and is public",
            at=repo_id,
            remedy="--public if everybody may see the model, or another name",
        )
    if not names:
        return
    if MANIFEST not in names:
        raise RefusedError(
            f"this repository holds something that gqaconvert did not make (no {MANIFEST})",
            at=repo_id,
            remedy="another name",
        )
    if not overwrite:
        raise RefusedError(
            "this repository holds a model already",
            at=repo_id,
            remedy="--overwrite to replace it by a new commit, or another name",
        )


@contextmanager
def _explained(repo_id: str, again: str | None = None) -> Iterator[None]:
    """Turn what `huggingface_hub` raises into errors of this package, without its messages.

    Args:
        repo_id: where to say an error is.
        again: command that repeats an upload; without one only questions are asked, and whether
            somebody is logged in and the repository exists is left to the caller.
    """
    from huggingface_hub import errors

    try:
        yield
    except GqaconvertError:
        raise
    # Uploads raise what their threads and hf_xet raise, which is not documented.
    except Exception as error:
        answered = isinstance(
            error, errors.LocalTokenNotFoundError | errors.RepositoryNotFoundError
        )
        if again is None and answered:
            raise
        what, remedy = _reason(error)
        raise GqaconvertError(
            f"the upload failed: {what}" if again else what,
            at=repo_id,
            remedy=f"{again}  # {remedy}" if again else remedy,
        ) from error


def _reason(error: Exception) -> tuple[str, str]:
    """Say what went wrong and what helps, from the first error of the chain that tells."""
    from huggingface_hub.errors import HfHubHTTPError

    transport = cast("type[Exception]", HfHubHTTPError.__bases__[0])  # httpx.HTTPError
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, HfHubHTTPError) and each.response is not None:
            return _answer(each.response.status_code)
        if isinstance(each, transport | ConnectionError | TimeoutError):
            kind = type(each).__name__
            return f"the Hub does not answer ({kind})", "once network, proxy and HF_ENDPOINT work"
        if isinstance(each, ValueError) and str(each).startswith("Invalid metadata"):
            faults = " ".join(str(each).split("\n")[1:]).strip()
            return f"the Hub refuses the metadata of README.md: {faults}", "after correcting it"
        each = each.__cause__ or each.__context__
    return type(error).__name__, "repeating it goes on where it stopped"


def _answer(status: int) -> tuple[str, str]:
    known = {
        401: ("the login is not valid (HTTP 401)", _LOG_IN_TO_WRITE),
        402: ("the account has no room left (HTTP 402)", "after freeing some or paying for more"),
        403: ("the login may not write there (HTTP 403)", _LOG_IN_TO_WRITE),
        404: ("the repository is gone, or may not be written to (HTTP 404)", _LOG_IN_TO_WRITE),
        409: ("somebody else made or changed the repository meanwhile (HTTP 409)", "if it is fine"),
        429: ("too many requests (HTTP 429)", "in some minutes"),
    }
    return known.get(status, (f"the Hub answers with HTTP {status}", "in some minutes"))


@contextmanager
def _collected() -> Iterator[list[str]]:
    """Collect warnings, which would be printed with lines of other packages' code."""
    noted: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield noted
    noted += [str(each.message) for each in caught if each.category is UserWarning]
