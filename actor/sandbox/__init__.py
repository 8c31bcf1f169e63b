"""Sandbox that runs programs written by a policy in bubblewrap, isolated from the host.

Use `with pool.Sandbox() as sandbox, sandbox.open(program) as box: outcome = box.run(case)`. `self_test.check_isolation`
tests whether this machine can isolate programs; without that no policy program runs.
"""
