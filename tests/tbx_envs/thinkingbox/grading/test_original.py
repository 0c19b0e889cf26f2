"""Our verdicts beside those of the original's own worker, on the same test code and evidence, where it is installed.

Set `TBX_SERVERS_PYTHON` to an interpreter that has both the original framework and the requirements of its servers.
"""

import http.server
import json
import os
import subprocess
import threading

import pytest
from saying import FIXTURE_MODULES, SayingEndpoint
from test_evidence import EPISODE, EVIDENCE_OPTIONS
from verdicts import CASES, code_of

from tbx_envs.errors import CheckFault
from tbx_envs.thinkingbox.grading.evidence import evidence_of
from tbx_envs.thinkingbox.grading.judge import EndpointJudge

PYTHON = os.environ.get("TBX_SERVERS_PYTHON", "")
HAS_ORIGINAL = bool(PYTHON) and not subprocess.run([PYTHON, "-c", "import thinkingbox"], capture_output=True).returncode

pytestmark = [
    pytest.mark.real_data,
    pytest.mark.skipif(not HAS_ORIGINAL, reason="TBX_SERVERS_PYTHON names no interpreter that has the original"),
]


@pytest.fixture(scope="module")
def judge_url():
    """A model server that says what the last part of its path says."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            message = {"role": "assistant", "content": self.path.strip("/")}
            body = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


# The original's worker, begun once: each request of the list on stdin is answered by a forked copy of it.
PROGRAM = """
import io, json, os, sys
from thinkingbox.common.testrunner import TestScriptSubprocess
answers = []
for request in json.load(sys.stdin):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        with open(write, "w") as file:
            TestScriptSubprocess.test_process_entrypoint(io.StringIO(json.dumps(request)), file)
        os._exit(0)
    os.close(write)
    with open(read) as file:
        answers.append(file.read().rpartition(chr(0))[2])
    os.waitpid(child, 0)
json.dump(answers, sys.stdout)
"""


def originals_results(cases, url):
    """What the original's worker says to each; None where it dies or answers what is no result."""
    requests = [
        {
            "code": case.code,
            "judge_config": {"type": "aoai", "deployment": "m", "endpoint_url": f"{url}/{case.says}"},
            "fixtures_config": case.fixtures,
            "test_context": case.evidence,
            "test_uid": "shop.py:test_it",
        }
        for case in cases
    ]
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM],
        input=json.dumps(requests),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(FIXTURE_MODULES)},
    )
    return [json.loads(answer) if answer else None for answer in json.loads(done.stdout)]


def originals_verdict(result):
    reward = None if result is None else as_reward(result["reward"])
    if reward is None or result["is_system_error"]:  # the runner that reads the worker's answer voids these too
        return "void", None, None
    if result["result"]:
        return "passed", reward, None
    return "failed", reward, result["lineno"] if "not available" not in result["line_content"] else None


def as_reward(value):
    """A JSON value as the original's result model takes it for its reward, a float from 0 to 1, or None."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number <= 1 else None


def our_verdict(case, worker):
    judge = EndpointJudge(SayingEndpoint(case.says))
    try:
        report = worker.grade(
            case.code, case.evidence, fixtures=case.fixtures, judge=judge, session=None, uid="shop.py:test_it"
        )
    except CheckFault:
        return "void", None, None
    found = [int(line.split()[1][:-1]) for line in report.differences if line.startswith("line ")]
    return ("passed" if report.passed else "failed"), report.reward, (found or [None])[-1]


def test_every_verdict_is_the_originals(worker, judge_url):
    theirs = [originals_verdict(result) for result in originals_results(CASES, judge_url)]
    ours = [our_verdict(case, worker) for case in CASES]
    both = zip(CASES, ours, theirs, strict=True)
    assert {case.name: (our, their) for case, our, their in both if our != their} == {}


def test_the_original_reads_our_evidence_as_we_do(worker, judge_url):
    evidence = evidence_of(EPISODE, **EVIDENCE_OPTIONS)
    body = "import json\nprint(json.dumps(x.model_dump()), x.transcript(), x.transcript(1), x.query(), sep=chr(10))"
    case = type(CASES[0])("all", code_of(body), "passed", 1.0, evidence=evidence)
    theirs = originals_results([case], judge_url)[0]["prints"].splitlines()
    report = worker.grade(case.code, evidence, fixtures={}, judge=None, session=None, uid="shop.py:test_it")
    ours = [note.removeprefix("printed: ") for note in report.notes]
    assert ours == [line for line in theirs if line]
    assert json.loads(ours[0]) == evidence  # nothing is dropped, added or changed
