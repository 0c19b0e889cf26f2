"""One check worker for all tests that need no other, and judges that say what they are told to."""

import pytest
from saying import FIXTURE_MODULES, SayingEndpoint

from tbx_envs.thinkingbox.grading.judge import EndpointJudge
from tbx_envs.thinkingbox.grading.test_code import CheckWorker


@pytest.fixture(scope="session")
def worker():
    with CheckWorker(paths=[FIXTURE_MODULES]) as made:
        yield made


@pytest.fixture
def judge_saying():
    return lambda *texts, **options: EndpointJudge(SayingEndpoint(*texts), **options)
