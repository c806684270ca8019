"""A run's checkpoints: write them, find them, read them back, and continue them in later runs.

::

    loop/trainer.py, one run
     │ at its start
     ├─ ancestor.agree_on_ancestor      the checkpoint of another run to continue: an Ancestor
     ├─ directories.claim_directories   lock the run's directories against other runs
     ├─ resume.resume_from              load the run's own newest usable checkpoint → its record
     │  ancestor.load_ancestor          or the other run's; restoring.grow_tables → GrownTables
     │  resume.load_weights             or only weights
     │    └─ restoring.load_state       files → state, of any world size; grown tables
     │ while it runs and at its end
     └─ saving.Checkpoints.save         in a thread; directories: names, the newest ones, removal
          └─ saving.save_checkpoint     state → files, complete or absent

The *state* is the tensors of a :class:`training.launch.run_state.RunState`; the *record* is the
content of ``model.json`` (:mod:`models.checkpoint.record`). The parts that serving also reads are
in :mod:`models.checkpoint`.
"""
