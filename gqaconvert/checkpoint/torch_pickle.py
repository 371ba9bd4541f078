"""The part of pickle that plain tensors need, interpreted without executing anything.

torch describes a state dict by a pickle. The standard unpickler would import and call whatever that
names, and can be made to fill memory. This reader walks the opcodes itself, as torch's own
`weights_only` loader does, knows the few names that tensors are built from, and refuses every other
one. It yields descriptions, never objects of somebody else's class.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import IO

from gqaconvert.errors import CheckpointError
from gqaconvert.units import ELEMENT_TYPES

RESAVE = (
    "if you trust the file, load it with torch.load and write its state dict"
    " with safetensors.torch.save_file"
)

STORAGE_TYPES: dict[str, str | None] = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
    "UntypedStorage": None,
}  # fmt: skip
"""Storage classes and the safetensors tag of their elements; None where the tensor has its own."""


@dataclass(frozen=True, slots=True)
class Name:
    """A global the pickle refers to, such as "torch.FloatStorage"; compared, never imported."""

    path: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of elements that tensors look into.

    Attributes:
        dtype: safetensors tag; None when counted in bytes.
        key: the name of its record.
        count: elements (bytes when `dtype` is None).
    """

    dtype: str | None
    key: str
    count: int

    @property
    def size_bytes(self) -> int:
        """Bytes the storage takes in its file."""
        return self.count * (ELEMENT_TYPES[self.dtype].size_bytes if self.dtype else 1)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: a strided view of a storage, `offset` and `strides` in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_pickle(stream: IO[bytes], at: str) -> object:
    """Interpret one pickle and leave `stream` right behind it.

    Returns:
        dicts, lists, tuples, strings, numbers, and `Name`, `Storage` and `View` in the place of
        torch's objects.

    Raises:
        CheckpointError: damaged, or it asks for anything that tensors are not made of.
    """
    machine = _Machine(at)
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            machine.step(opcode.name, argument)
        return machine.stack.pop()
    except (ValueError, IndexError, KeyError) as error:  # bad encoding, empty stack, unset memo
        raise CheckpointError(f"damaged pickle: {error}", at=at, remedy=_AGAIN) from error


_AGAIN = "fetch the checkpoint again; an interrupted download leaves such files"
_LITERALS = frozenset({
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
})  # fmt: skip
_MAX_DIMENSIONS = 64  # torch's own limit
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLE_SIZES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_TENSORS = frozenset({
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
})  # fmt: skip
_WRAPPERS = frozenset({
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
})  # fmt: skip
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_CLASSES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})
_ORDERED_DICT = "collections.OrderedDict"
_CALLABLE = _TENSORS | _WRAPPERS | {_SUBCLASS, _ORDERED_DICT}
_STORAGES = {
    f"{module}.{name}": tag
    for module in ("torch", "torch.cuda", "torch.storage")
    for name, tag in STORAGE_TYPES.items()
}
_ELEMENTS = {f"torch.{kind.config_name}": tag for tag, kind in ELEMENT_TYPES.items()}
_ALLOWED = _CALLABLE | _CLASSES | _STORAGES.keys() | _ELEMENTS.keys()


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def step(self, opcode: str, argument: object) -> None:
        """Execute one opcode."""
        stack = self.stack
        if opcode in _LITERALS:
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in ("PROTO", "FRAME", "STOP"):
            return
        elif opcode in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int):
            self.memo[argument] = stack[-1]
        elif opcode == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif opcode in ("GET", "BINGET", "LONG_BINGET") and isinstance(argument, int):
            stack.append(self.memo[argument])
        elif opcode == "GLOBAL" and isinstance(argument, str):
            stack.append(self._name(*argument.split(" ", 1)))
        elif opcode == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self._name(module, attribute))
        elif opcode == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif opcode == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(self._call(function, arguments))
        elif opcode == "BUILD":
            self._ignore_state()
        else:
            self._container(opcode)

    def _container(self, opcode: str) -> None:
        stack = self.stack
        if opcode == "MARK":
            self.marked.append(stack)
            self.stack = []
        elif opcode in _TUPLE_SIZES:
            stack.append(tuple(reversed([stack.pop() for _ in range(_TUPLE_SIZES[opcode])])))
        elif opcode == "TUPLE":
            self._close(tuple)
        elif opcode == "LIST":
            self._close(list)
        elif opcode == "EMPTY_LIST":
            stack.append([])
        elif opcode == "EMPTY_DICT":
            stack.append({})
        elif opcode == "DICT":
            self._close(list)
            self.stack.append(self._dictionary(_pairs(self.stack.pop())))
        elif opcode in ("APPEND", "APPENDS"):
            items = [stack.pop()] if opcode == "APPEND" else self._unmark()
            target = self.stack[-1]
            if not isinstance(target, list):
                raise ValueError("items for something that is not a list")
            target.extend(items)
        elif opcode in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if opcode == "SETITEM" else self._unmark()
            target = self.stack[-1]
            if not isinstance(target, dict):
                raise ValueError("keys for something that is not a dict")
            target.update(self._dictionary(_pairs(items)))
        else:
            raise self._refusal(f"it uses the opcode {opcode}")

    def _unmark(self) -> list[object]:
        items, self.stack = self.stack, self.marked.pop()
        return items

    def _close(self, kind: type[list[object]] | type[tuple[object, ...]]) -> None:
        items = self._unmark()
        self.stack.append(kind(items))

    def _dictionary(self, pairs: list[tuple[object, object]]) -> dict[str | int, object]:
        entries: dict[str | int, object] = {}
        for key, value in pairs:
            # State dicts have no others, and hashing nested tuples can be made to take forever.
            if not isinstance(key, str | int):
                raise self._refusal(f"a key is a {type(key).__name__}, not a string")
            entries[key] = value
        return entries

    def _name(self, module: object, attribute: object) -> Name:
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise ValueError("a global whose name is not a string")
        path = f"{module}.{attribute}"
        if path not in _ALLOWED:
            raise self._refusal(f"it asks for {path}")
        return Name(path)

    def _storage(self, persistent: object) -> Storage:
        match persistent:
            case ("storage", Name(path), str(key), str(), int(count)) if path in _STORAGES:
                pass
            case ("storage", Name(path), str(key), str(), int(count), None) if path in _STORAGES:
                pass  # the pre-1.6 format appends a view, which no release since 0.4 has used
            case _:
                raise self._refusal(
                    "it refers to something that is not a storage of plain elements"
                )
        _counts((count,))
        return Storage(_STORAGES[path], key, count)

    def _call(self, function: object, arguments: object) -> object:
        if not isinstance(function, Name) or function.path not in _CALLABLE:
            raise self._refusal("it calls something that does not build tensors")
        path = function.path
        match arguments:
            case () if path == _ORDERED_DICT:
                return {}
            case (list(pairs),) if path == _ORDERED_DICT:
                return self._dictionary(_pairs([item for pair in pairs for item in _pair(pair)]))
            case (View() as view, *_) if path in _WRAPPERS:
                return view
            case (Name(inner), Name(kind), tuple(built), *_) if path == _SUBCLASS:
                if inner in _TENSORS and kind in _CLASSES:
                    return self._tensor(inner, built)
            case tuple() if path in _TENSORS:
                return self._tensor(path, arguments)
        raise self._refusal(f"it calls {path} with arguments of another form than torch's")

    def _tensor(self, path: str, arguments: tuple[object, ...]) -> View:
        match arguments:
            case (Storage() as storage, int(offset), tuple(shape), tuple(strides), *more):
                pass
            case _:
                raise self._refusal("a tensor is described in another form than torch's")
        dtype = storage.dtype
        if path.endswith("_v3"):
            dtype = (
                _ELEMENTS.get(more[2].path) if len(more) > 2 and isinstance(more[2], Name) else None
            )
        if dtype is None:
            raise self._refusal("a tensor has no element type")
        position = 3 if path.endswith("_v3") else 2
        if path not in ("torch._utils._rebuild_tensor",) and any(more[position:]):
            raise self._refusal("a tensor is a conjugated or negated view")
        _counts((offset,))
        return View(storage, dtype, offset, _counts(shape), _counts(strides))

    def _ignore_state(self) -> None:
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):  # an OrderedDict's attributes, such as _metadata
            raise self._refusal("it sets attributes of something that is not a dict")

    def _refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"a pickle that is not plain tensors: {reason}; nothing of it was executed",
            at=self.at,
            remedy=RESAVE,
        )


def _pairs(items: object) -> list[tuple[object, object]]:
    if not isinstance(items, list) or len(items) % 2:
        raise ValueError("a key without a value")
    return list(zip(items[::2], items[1::2], strict=True))


def _pair(pair: object) -> tuple[object, ...]:
    if isinstance(pair, list | tuple) and len(pair) == 2:
        return tuple(pair)
    raise ValueError("a dict made from something that is not pairs")


def _counts(items: tuple[object, ...]) -> tuple[int, ...]:
    counts = tuple(item for item in items if type(item) is int and 0 <= item < 2**63)
    if len(counts) != len(items) or len(items) > _MAX_DIMENSIONS:
        raise ValueError("a shape, strides or an offset that are not counts")
    return counts
