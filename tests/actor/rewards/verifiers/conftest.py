from tests.actor.sandbox.conftest import isolated as isolated
