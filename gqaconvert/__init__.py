"""Turn multi-head attention models into grouped-query ones, and prove the gain and the cost.

The names below are the Python interface; each is imported when first used, so that `import
gqaconvert` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gqaconvert.attention.estimation import estimate as estimate
    from gqaconvert.attention.inspection import inspect as inspect
    from gqaconvert.calibration.calibrate import calibrate as calibrate
    from gqaconvert.evaluation.evaluate import evaluate as evaluate
    from gqaconvert.reporting.report import report as report
    from gqaconvert.surgery.convert import convert as convert
    from gqaconvert.surgery.expand import expand as expand
    from gqaconvert.surgery.in_memory import convert_model as convert_model
    from gqaconvert.surgery.verify_model import verify as verify
    from gqaconvert.training.run import uptrain as uptrain

__version__: str

_PLACES = {
    "calibrate": "gqaconvert.calibration.calibrate",
    "convert": "gqaconvert.surgery.convert",
    "convert_model": "gqaconvert.surgery.in_memory",
    "estimate": "gqaconvert.attention.estimation",
    "evaluate": "gqaconvert.evaluation.evaluate",
    "expand": "gqaconvert.surgery.expand",
    "inspect": "gqaconvert.attention.inspection",
    "report": "gqaconvert.reporting.report",
    "uptrain": "gqaconvert.training.run",
    "verify": "gqaconvert.surgery.verify_model",
}

__all__ = [
    "__version__",
    "calibrate",
    "convert",
    "convert_model",
    "estimate",
    "evaluate",
    "expand",
    "inspect",
    "report",
    "uptrain",
    "verify",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name == "__version__":
        from importlib.metadata import version  # 60 ms, a third of what --help takes

        return version("gqaconvert")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'gqaconvert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
