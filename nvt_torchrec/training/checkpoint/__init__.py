"""A run's checkpoints: written, found again, read back, and continued by later runs.

::

    loop/trainer.py, one run
     │ at its start
     ├─ ancestor.agree_on_ancestor      which checkpoint of another run it continues: an Ancestor
     ├─ directories.claim_directories   no other run writes to its directories meanwhile
     ├─ resume.resume_from              its own newest checkpoint that can be used → its record
     │  ancestor.load_ancestor          or the other run's; restoring.grow_tables → GrownTables
     │  resume.load_weights             or weights alone
     │    └─ restoring.load_state       files → state, of any world size; grown tables
     │ meanwhile and at its end
     └─ saving.Checkpoints.save         in a thread; directories: names, the newest ones, removal
          └─ saving.save_checkpoint     state → files, whole or absent

The *state* is the tensors of a :class:`training.launch.run_state.RunState`; the *record* is what
``model.json`` says (:mod:`models.checkpoint.record`). The parts that serving reads as well are in
:mod:`models.checkpoint`.
"""
