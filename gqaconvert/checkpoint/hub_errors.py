"""What can go wrong with the Hub, in this package's words.

Messages of `huggingface_hub` are left out of ours: they may hold signed addresses.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from gqaconvert.errors import CheckpointError, GqaconvertError, RefusedError, UsageError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError


class HubUnreachable(GqaconvertError):
    """Neither the Hub nor the cache gives what was asked for."""


@contextmanager
def explained(repo_id: str, at: str) -> Iterator[None]:
    """Turn what `huggingface_hub` raises into errors of this package.

    Args:
        repo_id: owner/name, for remedies.
        at: where to say an error is.

    Raises:
        UsageError: no such repository or revision.
        CheckpointError: the repository lacks a file.
        RefusedError: no space left.
        HubUnreachable: offline, or no answer.
        GqaconvertError: no access, and all else.
    """
    from huggingface_hub import errors

    transport = cast("type[Exception]", errors.HfHubHTTPError.__bases__[0])  # httpx.HTTPError
    page = f"the model's page for {repo_id}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise GqaconvertError(
            "access to this model is restricted: its licence must be accepted first",
            at=at,
            remedy=f"accept it on {page}, then log in with `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(
            "no such revision", at=at, remedy=f"a branch, tag or commit from {page}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            "no such model on the Hub, or a private one",
            at=at,
            remedy="check the spelling; for a private model, log in with `hf auth login`",
        ) from error
    except errors.HFValidationError as error:
        raise UsageError("not a Hub id", at=at, remedy="owner/name") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _not_local(at, error) from error
    except errors.EntryNotFoundError as error:
        raise CheckpointError(
            "the repository has no such file",
            at=at,
            remedy="a repository that holds a model for transformers",
        ) from error
    except errors.HfHubHTTPError as error:
        raise _refused(at, error) from error
    except transport as error:
        raise unreachable(at, f"the Hub does not answer ({type(error).__name__})") from error
    except OSError as error:
        raise _file_error(at, error) from error


def hub_address() -> str:
    """Return the address of the Hub, without the user and password that a mirror's may hold."""
    from huggingface_hub import constants

    scheme, separator, rest = constants.ENDPOINT.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def unreachable(at: str, why: str) -> HubUnreachable:
    """Say that something is neither on the Hub nor in the cache."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set and the model is not, or not wholly, in the cache"
        return HubUnreachable(
            why, at=at, remedy="unset HF_HUB_OFFLINE, or point HF_HOME to a cache"
        )
    return HubUnreachable(
        f"{why}, and the model is not, or not wholly, in the cache",
        at=at,
        remedy="check the network, a proxy and HF_ENDPOINT; or name a folder with the model",
    )


def _not_local(at: str, error: Exception) -> GqaconvertError:
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error.__cause__, HfHubHTTPError):
        return _refused(at, error.__cause__)
    return unreachable(at, "the Hub does not answer")


def _refused(at: str, error: HfHubHTTPError) -> GqaconvertError:
    status = error.response.status_code
    if status in (401, 403):
        return GqaconvertError(
            f"the Hub denies access (HTTP {status})",
            at=at,
            remedy="a token that may read this model: `hf auth login`",
        )
    if status == 429:
        return GqaconvertError(
            "the Hub asks to wait: too many requests", at=at, remedy="try again in some minutes"
        )
    return unreachable(at, f"the Hub answers with HTTP {status}")


def _file_error(at: str, error: OSError) -> GqaconvertError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RefusedError(
            "no space left for the download",
            at=at,
            remedy="make room, or point HF_HOME to another disk; a second try goes on from here",
        )
    if error.errno is not None:
        return GqaconvertError(
            f"the cache cannot be used: {error.strerror}",
            at=error.filename or at,
            remedy="point HF_HOME to a folder that can be written to",
        )
    return GqaconvertError(
        f"the download did not arrive whole ({type(error).__name__})", at=at, remedy="try again"
    )
