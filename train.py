"""Train a language model: python train.py --config=configs/gpt_tiny.py [--config.model.n_layers=6 ...]

With --plan [--target=h100 --devices=1024] it shows what the run would do on GPUs that are not here, and does not train.

Reads top to bottom. Every object a run needs is made here, once, and passed down; there is no global state and no branch per strategy:
how a run is parallel is in its mesh and its rules.
"""

import sys
from contextlib import closing
from itertools import takewhile

import jax

from mesh_lm import distributed, launch
from mesh_lm.checkpoint import Checkpoints
from mesh_lm.commands import command_line, plan
from mesh_lm.data.batches import Batches
from mesh_lm.data.corpus import prepare
from mesh_lm.distributed.phases import Phases
from mesh_lm.inference.trained import keep_tokenizer, require_tokenizer, weights
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding, evaluate
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import weights_of
from mesh_lm.state.initial import fresh_state, init_state
from mesh_lm.training import elastic
from mesh_lm.training.check import check
from mesh_lm.training.evaluation import mean_loss, sample
from mesh_lm.training.monitor import Monitor
from mesh_lm.training.replicas import require_equal
from mesh_lm.training.skip_guard import SkipGuard
from mesh_lm.training.step import train_step
from mesh_lm.training.watchdog import Watchdog
from sharding_rules import Shard, make_mesh


def main(argv: list[str]) -> int:
    # 1. Config: one frozen dataclass. What cannot run stops here, with every reason at once; --plan stops here with what would happen.
    planned, argv = plan.asked(argv)
    config = command_line.parse(argv)
    if planned:
        return plan.show(planned, config)
    phases = Phases()
    distributed.start(config, phases=phases)
    config = check(elastic.fit(config), jax.device_count())

    # 2. Mesh and rules, bound into the one object through which the model speaks of sharding.
    shard = Shard(config.rules, make_mesh(config.mesh))

    # 3. Model, optimizer and step: shapes and shardings only, no memory touched.
    layout = ModelLayout.of(config.model, shard, config.pipeline)
    optimizer = Optimizer(config.optimizer, config.train.steps)
    step = train_step(layout, optimizer, config.seed, config.health.outlier)
    evaluation = jax.jit(evaluate(layout))

    with (
        Watchdog(config.health, phases, distributed.log_prefix()),
        distributed.StopOnSigterm() as stop,
        Checkpoints(config, phases) as checkpoints,
    ):
        # 4. State: the newest checkpoint that is whole, restored onto whatever mesh this run has and verified; or none yet.
        saved, restored = checkpoints.restore(layout, optimizer)
        n = saved.step if saved else 0
        read = weights(config.init_from, layout) if config.init_from and not saved else None

        # 5. Data: text, tokens, sequences. The position in them is one number.
        phases.at("data")
        with distributed.collective_errors(), distributed.process0_first("data"):
            corpus = prepare(
                config.data, vocab=config.data.tokenizer_vocab, model_vocab=config.model.vocab_size, progress=distributed.print_on_process0
            )
            batches = Batches(config, corpus, batch_sharding(layout), saved.data if saved else None, n)
        if read and (tokenizer := corpus.tokenizer()):
            require_tokenizer(config.init_from, tokenizer)
        distributed.assert_equal_across_processes(
            "the data", str(batches.state(batches.position)), "give them the same files, and an output on a disk that they share"
        )
        if restored is not None:
            state = restored
        else:
            state = fresh_state(layout, optimizer, read()) if read else init_state(layout, optimizer, config.seed)
        with distributed.collective_errors():
            tokenizer = keep_tokenizer(config.output, corpus.tokenizer())
            monitor = Monitor(config, layout, corpus, phases, n)
        guard = SkipGuard(config.health, monitor.note)

        # 6. The loop.
        with monitor, closing(batches.train()) as training:

            def measure(n: int) -> None:
                def go_on(batch: object) -> bool:
                    phases.at("evaluate")
                    return not stop.poll()

                with monitor.paused():
                    heldout = takewhile(go_on, batches.heldout())
                    loss = mean_loss(evaluation, weights_of(state), heldout)
                if not stop.requested:
                    monitor.heldout(n, loss)

            if saved:
                changes = [*saved.changed(config), *batches.changed]
                monitor.note(f"resumed at step {n} ({saved.certificate})" + "".join(f"\n  changed since: {change}" for change in changes))
            stepping = phases.steps(training)
            while n < config.train.steps:
                position, batch = next(stepping)
                n += 1
                state, metrics = step(state, batch)
                if began := guard.step(monitor.step(n, metrics)):  # too many skips: roll back, skip the batches
                    saved, state = checkpoints.roll_back(began, state, layout, optimizer)
                    n = saved.step
                    monitor.roll_back(n)
                    continue
                checkpoints.poll(n)
                last, stopping = n == config.train.steps, stop.poll()  # read once: a signal from here on is for the next step
                # During a bad streak nothing is saved: retention must not delete the checkpoint to roll back to.
                saving = last or stopping or (checkpoints.due(n) and not guard.consecutive_skips)
                if config.health.replicas and (saving or n % config.health.replicas == 0):
                    phases.at("evaluate")
                    require_equal(state)
                if saving:
                    state = checkpoints.save(n, state, batches.state(position), layout, optimizer, last=last or stopping)
                if stopping and not last:
                    monitor.note(f"stopped by SIGTERM after step {n}; the same command continues from there")
                    return launch.EXIT_PREEMPTED
                if not last and config.train.eval_every and n % config.train.eval_every == 0:
                    measure(n)

            # 7. What it came to: the held-out loss, a plot and a text.
            phases.at("evaluate")
            if not distributed.broadcast_from_process0(monitor.has_heldout(int(state["step"]))):
                measure(int(state["step"]))
            if stop.requested:
                return launch.EXIT_PREEMPTED
            monitor.finish(sample(layout, weights_of(state), tokenizer, config.train.sample_tokens, config.seed) if tokenizer else None)
    return 0


if __name__ == "__main__":
    sys.exit(distributed.run(main, sys.argv[1:]))
