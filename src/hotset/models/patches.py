"""Every change that hotset makes to objects of transformers, of torch or of a model, with its reason and its undoing.

Those of a model last until it is closed, or until it is whole again, and lie on one stack (`Patches`). Those of the
libraries serve every model of the process: they last as long as one load or one capture, and one holder at a time.
"""

from __future__ import annotations

import logging as python_logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from hotset.errors import ClosedError, ModelError
from hotset.owner import Owner

Undo = Callable[[], Any]

MAX_SHAPES = 64
"""Of one small module, by batch, width and type: beyond torch's own limit of eight they would not be compiled."""
_SMALL = ("Norm", "RotaryEmbedding", "Router")
_IGNORED_KEYS = "_keys_to_ignore_on_load_unexpected"
_CALLS = ("forward", "generate", "save_pretrained")
_COPIES = ("__deepcopy__", "__reduce_ex__")  # asked of the instance by copy and pickle alike
_ATTENTION = ("sdpa", "eager")  # the implementations whose masks our attention reads
_MISSING = object()
_LOADING = threading.RLock()
_CAPTURING = threading.RLock()


@dataclass(eq=False, slots=True)
class Patch:
    """One change: what undoes it, and whether it stays on a closed model until that is whole again."""

    undo: Undo
    until_whole: bool


class Patches:
    """What was changed in one model, and by it; undone newest first, each whatever the others raise."""

    def __init__(self) -> None:
        self._made: list[Patch] = []

    def add(self, undo: Undo, *, until_whole: bool = False) -> None:
        """Have something undone when the model is closed, or only once it is whole again."""
        self._made.append(Patch(undo, until_whole))

    def close(self) -> None:
        """Undo all but what a model without its experts must keep: what refuses to run, save or copy it."""
        self._undo([patch for patch in self._made if not patch.until_whole])

    def lift(self) -> None:
        """Undo all: the model is whole again, or serves another engine."""
        self._undo(list(self._made))

    def _undo(self, patches: list[Patch]) -> None:
        with ExitStack() as stack:
            for patch in patches:
                stack.callback(self._undo_one, patch)

    def _undo_one(self, patch: Patch) -> None:
        patch.undo()
        self._made.remove(patch)


def replace_attributes(thing: Any, values: dict[str, Any]) -> Undo:
    """Put attributes on one instance, over those of its class; undoing brings back what the instance had itself."""
    before = {name: vars(thing)[name] for name in values if name in vars(thing)}
    vars(thing).update(values)

    def undo() -> None:
        for name in values:
            vars(thing).pop(name, None)
        vars(thing).update(before)

    return undo


def replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Undo:
    """Send the calls of one experts module to the engine.

    On the instance, so that neither its class nor transformers' table of experts implementations is touched;
    accelerate, for one, may have put a forward there before.
    """
    return replace_attributes(module, {"forward": forward})


def replace_calls(model: Any, forward: Callable[..., Any], generate: Callable[..., Any]) -> Undo:
    """Stand in for a model's forward, to replay decode steps, and for its generate, to give it a static cache."""
    return replace_attributes(model, {"forward": forward, "generate": generate})


def show_handle(model: Any, handle: Any) -> Undo:
    """Let a person reach the cache as `model.hotset`; it stays on a closed model, which still tells its statistics."""
    return replace_attributes(model, {"hotset": handle})


def refuse_saving(model: Any) -> Undo:
    """Have a model without its experts refuse to be saved as if it were whole."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ModelError("this model's experts are not in memory: hotset.detach(model) first, or copy its checkpoint")

    return replace_attributes(model, {"save_pretrained": refuse})


def refuse_calls(model: Any) -> Undo:
    """Have a closed model refuse whatever would run or save it without its experts.

    Its layers, called by themselves, are refused by the engine.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ClosedError

    plain = torch.compiler.disable(refuse)  # type: ignore[no-untyped-call]
    return replace_attributes(model, {name: plain for name in _CALLS if hasattr(model, name)})


def refuse_copies(model: Any) -> Undo:
    """Have a model refuse to be copied or pickled: threads, files and slots have no second copy."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ModelError(
            "a model that runs through hotset cannot be copied or pickled: load it a second time, "
            "or make it whole first by hotset.detach(model)"
        )

    return replace_attributes(model, dict.fromkeys(_COPIES, refuse))


def refuse_in_children(model: Any, owner: Owner) -> Undo:
    """Have calls of a model refused in forked processes, before anything else looks at them."""

    def check(*_: Any) -> None:
        owner.check()

    handle = model.register_forward_pre_hook(check, prepend=True)
    return lambda: handle.remove()


def take_parameter(
    module: torch.nn.Module, leaf: str, placeholder: torch.Tensor
) -> Callable[[torch.nn.Parameter], None]:
    """Put a shape without memory in the place of a parameter; returns what puts a parameter back there.

    Loaders, initialisers and optimisers pass over it. The parameter comes back to its place among the others.
    """
    order = list(module._parameters)
    undo = replace_attributes(module, {leaf: placeholder})
    del module._parameters[leaf]

    def put_back(parameter: torch.nn.Parameter) -> None:
        undo()
        known = module._parameters | {leaf: parameter}
        module._parameters.clear()
        module._parameters.update({name: known[name] for name in order if name in known})

    return put_back


def ignore_keys(model: Any, patterns: set[str]) -> Undo:
    """While its weights are read, have a model pass over the keys of the experts that were taken out.

    transformers reports each as unexpected otherwise; later loads into the model are not ours.
    """
    ignored = set(getattr(model, _IGNORED_KEYS, None) or ()) | patterns
    return replace_attributes(model, {_IGNORED_KEYS: ignored})


@contextmanager
def weights_loaded_by(load: Callable[..., Any]) -> Iterator[None]:
    """Have `load(stock, model, state_dict, files, config, ...)` read the weights of models that any thread loads.

    The experts are found and taken out between the building of a model and the reading of its weights: transformers
    has no hook there. Its loader changes globals of its own (the default type, `tie_weights`), so that loads of two
    threads spoil each other: those of hotset go one after another.
    """
    from transformers import PreTrainedModel

    with _LOADING:
        loader: Any = PreTrainedModel
        descriptor = vars(loader)["_load_pretrained_model"]
        try:
            loader._load_pretrained_model = staticmethod(partial(load, descriptor.__func__))
            yield
        finally:
            loader._load_pretrained_model = descriptor


@contextmanager
def gguf_read_by(read: Callable[[Any], Any]) -> Iterator[None]:
    """Have transformers read a GGUF file's keys by `read`, which is given the path, and not by the `gguf` package.

    That reader makes several objects of every token and of every element of any list, and knows nothing of shards.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError(f"a GGUF model needs the gguf package ({error}): pip install 'hotset[models]'") from error
    with _LOADING, ExitStack() as stack:
        _patch(stack, gguf, "GGUFReader", read)
        yield


@contextmanager
def small_parts_fused(model: Any, device: torch.device) -> Iterator[None]:
    """While a step is captured, have norms, rotations and routers compiled into one kernel each, and our attention.

    Launched one by one, their small kernels take longer than the experts. The rotation is a function of the family's
    file, which all its models use: other threads go on with the plain one.
    """
    if device.type != "cuda":
        yield
        return
    with _CAPTURING, ExitStack() as stack:
        for module, forward in _compiled_forwards(model):
            _patch(stack, module, "forward", forward)
        home: Any = sys.modules[type(model).__module__]
        if rotate := getattr(home, "apply_rotary_pos_emb", None):
            mine = _in_this_thread(torch.compile(rotate, dynamic=False), rotate)
            _patch(stack, home, "apply_rotary_pos_emb", mine)
        config: Any = torch._dynamo.config
        stack.enter_context(decode_attention_used(model))
        stack.enter_context(config.patch(recompile_limit=MAX_SHAPES))
        yield


def _compiled_forwards(model: Any) -> list[tuple[Any, Any]]:
    """The small modules of a model whose forward is their class's, each with that compiled."""
    kinds = {type(module) for module in model.modules() if any(part in type(module).__name__ for part in _SMALL)}
    compiled = {kind: torch.compile(kind.forward, dynamic=False) for kind in kinds}
    small = [module for module in model.modules() if type(module) in kinds and "forward" not in vars(module)]
    return [(module, types.MethodType(compiled[type(module)], module)) for module in small]


def _in_this_thread(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is ours in the calling thread and the library's in all others."""
    me = threading.get_ident()
    return lambda *args, **named: (ours if threading.get_ident() == me else stock)(*args, **named)


@contextmanager
def decode_attention_used(model: torch.nn.Module) -> Iterator[None]:
    """While a step is captured, send the attention of one model through our kernel, be it sdpa or eager attention.

    Its configuration stays as it is: some families look at the implementation's name to decide what the mask holds.
    Only the look-up of the function by that name is replaced, so the stock function is at hand for what we cannot do.
    Masks, other models and other implementations are left alone.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from hotset.engine.kernels.attention import decode_attention

    functions: Any = ALL_ATTENTION_FUNCTIONS
    before, mine = functions.get_interface, {id(part) for part in model.modules()}

    def ours_or_stock(stock: Any, module: torch.nn.Module, *given: Any, **named: Any) -> Any:
        chosen = partial(decode_attention, stock=stock) if id(module) in mine else stock
        return chosen(module, *given, **named)

    def look_up(attn_implementation: str, default: Any) -> Any:
        found = before(attn_implementation, default)
        return partial(ours_or_stock, found) if attn_implementation in _ATTENTION else found

    with ExitStack() as stack:
        _patch(stack, functions, "get_interface", look_up)
        yield


@contextmanager
def libraries_quiet(*, progress: bool) -> Iterator[None]:
    """While a command runs, keep the libraries' warnings to themselves, and their progress bars if so asked.

    What a person must know, hotset says in its own lines; in Python, outside of commands, all stays as it was set.
    """
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    library: Any = logging
    ours = python_logging.getLogger("hotset")
    with ExitStack() as stack, warnings.catch_warnings():
        stack.callback(ours.setLevel, ours.level)
        stack.callback(library.set_verbosity, library.get_verbosity())
        stack.callback(hub_logging.set_verbosity, hub_logging.get_verbosity())
        warnings.simplefilter("ignore")
        ours.setLevel(python_logging.ERROR)  # its remarks are printed as notes
        library.set_verbosity_error()
        hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        if not progress:
            if library.is_progress_bar_enabled():
                stack.callback(library.enable_progress_bar)
            elif not are_progress_bars_disabled():
                stack.callback(enable_progress_bars)
            library.disable_progress_bar()
            disable_progress_bars()
        yield


def _patch(stack: ExitStack, thing: Any, name: str, value: Any) -> None:
    """Put an attribute until a stack unwinds; how to undo it is noted first: an interrupt may come in between."""
    before = vars(thing).get(name, _MISSING)
    if before is _MISSING:
        stack.callback(vars(thing).pop, name, None)
    else:
        stack.callback(setattr, thing, name, before)
    setattr(thing, name, value)
