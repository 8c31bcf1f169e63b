"""Programs that a policy wrote, run where they can do no harm: in bubblewrap.

`pool.Sandbox` is the way in: `with Sandbox() as sandbox, sandbox.open(program) as box: outcome = box.run(case)`.
`isolation.check_isolation` says whether this machine can do it; without that nothing of a policy's is run.
"""
