"""A step that is made twice, with faults planted in what its calls get and return, on four CPU
devices under several rules."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
from support import GPT, host_batch, on_devices, shard_on, with_flipped_bit

from mesh_lm.config import OptimizerConfig
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State
from mesh_lm.state.initial import init_state
from mesh_lm.training.replay import ReplayedStep
from mesh_lm.training.step import Step, train_step

RULES = {
    "fsdp": {"fsdp": 4},
    "distributed": {"data": 2, "tensor": 2},
    "ddp": {"data": 4},
    "zero2": {"data": 4},
}
EVERY = 2
UP = "params", "blocks.mlp.up.weight"


@dataclasses.dataclass
class Calls:
    """Stands in for the run and the monitor, and counts what is asked of the step."""

    step_of: Callable[[], Step]
    fault: Callable[[int, State], State] = lambda call, state: state
    """Changes what call number `call`, from 0, returns."""
    before: Callable[[int, State], State] = lambda call, state: state
    """The same for what it gets."""
    step: int = 0
    calls: int = 0
    paused_calls: int = 0
    inside: bool = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def __call__(
        self, state: State, batch: dict[str, jax.Array]
    ) -> tuple[State, dict[str, jax.Array]]:
        call, self.calls, self.paused_calls = (
            self.calls,
            self.calls + 1,
            self.paused_calls + self.inside,
        )
        after, metrics = self.step_of()(self.before(call, state), batch)
        return self.fault(call, after), metrics

    def train(self, rules: str, steps: int) -> State:
        layout, optimizer, _ = trainer(rules)
        state, batch = init_state(layout, optimizer, 0), on_devices(host_batch(1), layout)
        step = ReplayedStep(self, EVERY, self, self)
        for _ in range(steps):
            state, _ = step(state, batch)
            self.step += 1
        return state


@functools.cache
def trainer(rules: str) -> tuple[ModelLayout, Optimizer, Step]:
    layout = ModelLayout.of(
        GPT, shard_on("distributed+megatron" if rules == "distributed" else rules, **RULES[rules])
    )
    optimizer = Optimizer(OptimizerConfig(warmup_steps=0), 4)
    return layout, optimizer, train_step(layout, optimizer, seed=0)


def sharded(state: State) -> tuple[str, str]:
    """Returns part and name of a leaf of which each device holds a shard of its own, if there is
    one."""
    leaves = {
        (part, name): x
        for part, named in state.items()
        if isinstance(named, dict)
        for name, x in named.items()
    }
    return next(
        (
            key
            for key, x in leaves.items()
            if len({str(shard.index) for shard in x.addressable_shards}) == 4
        ),
        UP,
    )


def flipped(state: State, part: str, name: str, device: int) -> State:
    return {
        **state,
        part: {**state[part], name: with_flipped_bit(state[part][name], device, word=1, bit=20)},
    }
