"""Checkpoints: tensors by torch's distributed checkpoint, JSON for the rest, checked and committed by a rename.

    RUN/checkpoints/step_0000500/   .metadata, *.distcp   model, EMA and optimizer tensors, resharded on load
                                    state.json            counters, what may not change, and every file's sum
    RUN/checkpoints/step_0000500.tmp/                      a save that was cut off; ignored and replaced

`manifest`, `listing`, `metadata` and `verify` import no torch, so that a refused resume is told before any rank starts.
Nothing in a checkpoint is ever executed: metadata is read by an unpickler that knows names and no code, tensors by
``torch.load(weights_only=True)``.
"""
