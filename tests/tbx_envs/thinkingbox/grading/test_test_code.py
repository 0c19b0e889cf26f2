"""Grades of test code: verdicts, isolation, limits, and that nothing is left behind."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from saying import FIXTURE_MODULES, SayingEndpoint
from verdicts import CASES, code_of

from tbx_envs.episode import CheckReport
from tbx_envs.errors import CheckFault, ConfigError, EndpointError, EndpointRefused, ToolFault
from tbx_envs.handed_down import ALLOWED
from tbx_envs.thinkingbox.grading import test_code
from tbx_envs.thinkingbox.grading.judge import EndpointJudge, YesJudge
from tbx_envs.thinkingbox.grading.test_code import CheckWorker, entered_result
from tbx_envs.thinkingbox.supervision.program import MARK

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def grade(worker, code, evidence=None, *, fixtures=None, judge=None, session=None, uid="shop.py:test_it"):
    return worker.grade(code, evidence or {}, fixtures=fixtures or {}, judge=judge, session=session, uid=uid)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


# --- verdicts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_test_is_graded_as_the_original_documents(case, worker, judge_saying):
    def graded():
        return grade(worker, case.code, case.evidence, fixtures=case.fixtures, judge=judge_saying(case.says))

    if case.verdict == "void":
        with pytest.raises(CheckFault, match="That is no verdict"):
            graded()
        return
    report = graded()
    assert (report.passed, report.reward, report.check) == (case.verdict == "passed", case.reward, "test_code")
    if case.line is not None:
        assert report.differences[-1].startswith(f"line {case.line}: ")
    assert bool(report.differences) == (not report.passed)


def test_a_failed_assertion_says_what_and_where(worker):
    report = grade(worker, code_of("total = 3\nassert total == 4, f'total is {total}\\nwanted 4'"))
    assert report == CheckReport(
        False,
        "test_code",
        ("total is 3", "wanted 4", "line 6: assert total == 4, f'total is {total}\\nwanted 4'"),
    )


def test_an_assertion_without_words_outside_of_the_test_still_says_something(worker):
    code = code_of("pass", parameters="x, judge, shop")
    (line,) = grade(worker, code, fixtures={"shop": {"type": "shop_fixtures.refusing"}}).differences
    assert line == "closed"


def test_a_test_that_returns_nothing_leaves_the_score_open_and_one_that_returns_a_number_gives_it(worker):
    assert grade(worker, code_of("pass")).score is None
    assert grade(worker, code_of("return 1")).score == 1.0


def test_a_fault_names_the_task_the_exception_the_line_and_the_traceback(worker):
    code = code_of("return look(x)", before="def look(x):\n    return x.effects['shop']['hash']")
    with pytest.raises(CheckFault) as caught:
        grade(worker, code, {"effects": {"other": {}}}, uid="shop.py:test_hash")
    said = str(caught.value)
    assert said.startswith(
        "task shop.py:test_hash: its test raised KeyError: 'shop' in line 2, `return x.effects['shop']['hash']`. "
    )
    assert 'File "<shop.py:test_hash>", line 5, in test_it' in said
    assert "check_server" not in said  # frames of ours explain nothing


def test_prints_and_metadata_are_notes(worker):
    code = code_of(
        """
        import sys
        print('a', 'b', sep='-', file=None)
        print('to stderr', file=sys.stderr)
        sys.stdout.write('written\\n')
        x.metadata['score'] = {'a': 1.5}
        x.metadata['odd'] = object
        """
    )
    report = grade(worker, code, {"metadata": {"replay_warnings": ["was there"]}})
    assert report.notes == (
        'score: {"a": 1.5}',
        "odd: \"<class 'object'>\"",
        "printed: a-b",
        "printed: to stderr",
        "printed: written",
    )


def test_a_flood_of_prints_is_cut(worker):
    report = grade(worker, code_of("for _ in range(1000): print('x' * 999)"))
    assert len("".join(report.notes)) < 21_000
    assert report.notes[-1] == "printed: [980000 bytes more were printed]"


# --- isolation ----------------------------------------------------------------------------------------------


FORGED = {"verdict": "passed", "reward": 1.0, "prints": "", "metadata": {}}
SEND = """
import json, os, socket
def send(result):
    body = json.dumps({"result": result}).encode()
    for descriptor in range(3, 64):
        try:
            socket.socket(fileno=os.dup(descriptor)).sendall(len(body).to_bytes(4, "big") + body)
        except OSError:
            pass
"""


def sending(body):
    return code_of(body) + SEND


@linux
@pytest.mark.parametrize("what_it_does", [f"send({FORGED}), os._exit(0)", "return 1.0"])
def test_a_process_that_a_test_started_has_no_say_in_its_verdict(worker, what_it_does):
    body = f"pid = os.fork()\nif pid == 0: {what_it_does}\nos.waitpid(pid, 0)\nassert False, 'the verdict of the test'"
    report = grade(worker, sending(body))
    assert (report.passed, report.differences[0]) == (False, "the verdict of the test")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"reward": 7.5}, "score 7.5, which is not from 0 to 1"),
        ({"reward": float("nan")}, "score nan"),
        ({"reward": True}, "reward is True"),
        ({"reward": "1"}, "reward is '1'"),
        ({"verdict": "yes"}, "verdict 'yes'"),
        ({"verdict": ["passed"]}, "verdict "),
        ({"verdict": "failed"}, "error is None"),
        ({"prints": None}, "prints is None"),
        ({"metadata": []}, "metadata is "),
    ],
)
def test_what_is_no_result_of_a_grade_is_refused_with_what_it_is(changed, said):
    with pytest.raises(ValueError, match=said):
        entered_result({**FORGED, **changed})


def test_a_result_that_test_code_has_written_is_not_believed_unread(worker):
    with pytest.raises(CheckFault, match=r"score 7\.5, which is not from 0 to 1"):
        grade(worker, sending(f"send({ {**FORGED, 'reward': 7.5} })\nos._exit(0)"))


def test_an_assertion_without_words_fails_and_half_a_character_in_words_is_replaced(worker):
    mute = "class Mute(AssertionError):\n    def __str__(self): raise KeyError\nraise Mute()"
    report = grade(worker, code_of(mute))
    assert (report.passed, report.differences[0]) == (False, "(its words cannot be had: KeyError)")
    assert grade(worker, code_of(r"assert False, 'half \ud800'")).differences[0] == "half \ufffd"


def test_a_test_cannot_change_the_world_of_the_next(worker):
    spoils = """
        import builtins, json, os, pathlib, thinkingbox.common.chat_types as chat_types
        json.loads = builtins.abs = chat_types.TestContext.query = None
        os.environ['SPOILT'] = '1'
        pathlib.Path('spoilt').write_text('x')
        """
    assert grade(worker, code_of(spoils)).passed
    looks = """
        import builtins, json, os
        assert json.loads('[1]') == [1] and builtins.abs(-1) == 1 and x.query
        assert 'SPOILT' not in os.environ and os.listdir() == []
        """
    assert grade(worker, code_of(looks)).passed


READS_ENVIRONMENTS = f"""
import os, pathlib
allowed = {sorted({*ALLOWED, MARK})!r}
owner = {{owner}}
parents = [os.getpid(), os.getppid(), owner]
assert os.environ['SHOP'] == 'open' and set(os.environ) - set(allowed) <= {{{{'SHOP'}}}}, sorted(os.environ)
if pathlib.Path('/proc/self/environ').exists():
    for pid in parents:
        for entry in pathlib.Path(f'/proc/{{{{pid}}}}/environ').read_text().split(chr(0)):
            name, _, value = entry.partition('=')
            assert not value or name in allowed or name == 'SHOP', name
os.environ['MYMODEL']
"""


def test_test_code_reads_no_variable_that_is_held_back_neither_its_own_nor_those_of_the_process_that_asks(monkeypatch):
    for name in ("MYMODEL", "DATABASE_URL", "GITHUB_PAT", "My_Secret_Name"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("SHOP", "open")
    monkeypatch.setenv("TBX_PASS_VARIABLES", "SHOP")
    with CheckWorker() as worker, pytest.raises(CheckFault, match="It names MYMODEL, which is set here") as caught:
        grade(worker, code_of(READS_ENVIRONMENTS.format(owner=os.getpid())))
    assert "KeyError" in str(caught.value) and "hush" not in str(caught.value)


@linux
def test_a_child_inherits_no_descriptor_and_works_in_an_empty_folder_that_goes_away(worker, tmp_path):
    with open(tmp_path / "ours", "w") as file:
        os.set_inheritable(file.fileno(), True)
        code = code_of(
            """
            import os
            links = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')]
            print(os.getcwd(), *sorted(os.readlink(link).split(':')[0] for link in links if os.path.islink(link)))
            """
        )
        (printed,) = grade(worker, code).notes
    _, folder, *held = printed.split()
    assert held == ["/dev/null", f"{folder}.stderr", f"{folder}.stderr", "socket"]  # the socket is the grade's own
    assert not os.path.exists(folder)


def test_grades_run_at_the_same_time_and_do_not_mix(worker):
    code = code_of("assert x.effects['shop']['number'] % 2 == 0, f\"{x.effects['shop']['number']}\"")

    def one(number):
        return grade(worker, code, {"effects": {"shop": {"number": number}}})

    with ThreadPoolExecutor(8) as threads:
        reports = list(threads.map(one, range(40)))
    assert [report.passed for report in reports] == [number % 2 == 0 for number in range(40)]
    assert [report.differences[0] for report in reports if not report.passed] == [str(n) for n in range(1, 40, 2)]


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("while True: pass", "took longer than 0.5 s"),
        ("import time\ntime.sleep(60)", "took longer than 0.5 s"),
        ("bytearray(10**9)", "raised MemoryError"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", r"ended its process \(SIGKILL\)"),
        ("import os\nos._exit(7)", r"ended its process \(exit code 7\)"),
        ("import ctypes\nctypes.string_at(0)", r"(?s)ended its process \(SIGSEGV\).*Segmentation fault"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)", "out of processor time"),
        (
            "import json\njson.dumps = None",
            r"(?s)ended its process \(exit code 1\).*'NoneType' object is not callable",
        ),
        ("def deeper(n): return deeper(n + 1)\ndeeper(0)", "raised RecursionError"),
    ],
)
def test_too_much_of_anything_is_a_fault_and_the_next_grade_is_none_the_worse(body, said, limited_worker):
    with pytest.raises(CheckFault, match=said):
        grade(limited_worker, code_of(body))
    assert grade(limited_worker, code_of("pass")).passed


@pytest.fixture(scope="module")
def limited_worker():
    with CheckWorker(timeout_s=0.5, memory_bytes=512 * 2**20) as made:
        yield made


def test_waiting_for_the_judge_does_not_count(limited_worker):
    class SlowJudge(YesJudge):
        def yesno(self, question):
            time.sleep(0.7)
            return True

    assert grade(limited_worker, code_of("assert judge.yesno('?')"), judge=SlowJudge()).passed
    with pytest.raises(CheckFault, match="took longer than"):
        grade(limited_worker, code_of("judge.yesno('?')\nwhile True: pass"), judge=SlowJudge())


# --- judges and servers -------------------------------------------------------------------------------------


def test_a_test_that_asks_a_judge_that_there_is_not_is_void_whatever_it_makes_of_it(worker):
    code = code_of("try: judge.yesno('?')\nexcept Exception: pass")
    with pytest.raises(CheckFault, match=r"Give judge=yes .* or judge=endpoint"):
        grade(worker, code)


def test_a_judge_that_fails_is_a_fault_and_never_a_no(worker, judge_saying):
    code = code_of("try: assert judge.yesno('?')\nexcept Exception: assert False, 'no'")
    with pytest.raises(CheckFault, match=r"shop.py:test_it: the judge did not answer: the server is down") as caught:
        grade(worker, code, judge=judge_saying(EndpointError("the server is down")))
    assert isinstance(caught.value.__cause__, EndpointError)


def test_a_judge_that_answers_no_request_ends_the_run_even_if_the_test_catches_it(worker, judge_saying):
    code = code_of("try: judge.yesno('?')\nexcept Exception: pass")
    with pytest.raises(ConfigError, match="the judge: answered 401"):
        grade(worker, code, judge=judge_saying(EndpointRefused("answered 401")))


def test_a_judge_that_breaks_is_a_fault_too(worker):
    class Broken(YesJudge):
        def yesno(self, question):
            raise ZeroDivisionError("oh")

        def evaluate_bool(self, system, user):
            return "maybe"

    with pytest.raises(CheckFault, match="did not answer: ZeroDivisionError: oh"):
        grade(worker, code_of("judge.yesno('?')"), judge=Broken())
    with pytest.raises(CheckFault, match="answered 'maybe', neither yes nor no"):
        grade(worker, code_of("judge.evaluate_bool('a', 'b')"), judge=Broken())


def test_what_the_judge_was_asked_and_said_is_in_the_notes(worker, judge_saying):
    asks = code_of("assert judge.text_yesno('Hi', 'Polite?')\nassert judge.yesno('True?')")
    report = grade(worker, asks, judge=judge_saying("yes", "no"))
    assert not report.passed
    assert report.notes == ("judge, yes: Polite?", "judge, no: True?")


def test_a_judge_with_motivations_gives_them_to_the_test_and_to_the_notes(worker, judge_saying):
    code = code_of(
        """
        assert judge.text_yesno('Hi', 'Polite?')
        assert judge.text_yesno_with_motivation('Hi', 'Kind?') == {'answer': True, 'motivation': 'It greets.'}
        assert [d['question'] for d in judge.drain_decisions()] == ['Polite?', 'Kind?']
        assert judge.drain_decisions() == []
        """
    )
    judge = judge_saying('{"motivation": "It greets.", "answer": "Yes"}', kind="motivation")
    report = grade(worker, code, judge=judge)
    assert report.passed, report.differences
    assert report.notes == ("judge, yes (It greets.): Polite?", "judge, yes (It greets.): Kind?")


def test_a_rubric_asks_its_questions_at_the_same_time(worker):
    together = threading.Barrier(3, timeout=20)

    class Meeting(YesJudge):
        def evaluate_bool(self, system, user):
            together.wait()
            return True

    code = code_of(
        "rubrics = [RubricJudge.Config(criterion=c, weight=1) for c in 'abc']\n"
        "return RubricJudge(judge, x, max_workers=3).evaluate('Hi', rubrics).reward",
        before="from thinkingbox.common.rubrics_judge import RubricJudge",
    )
    assert grade(worker, code, judge=Meeting()).reward == 1.0


class FakeSession:
    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def call_reserved(self, server, name, arguments):
        self.calls.append((server, name, arguments))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


CLIENT = {"client": {"type": "thinkingbox.common.SessionClientFixture", "endpoint": "http://127.0.0.1:7111"}}
SESSION = {"session_id": "s-1"}


def test_a_fixture_calls_the_servers_of_the_episode(worker):
    session = FakeSession({"text": "hi"})
    code = code_of(
        """
        client.set_session(x.session_id)
        assert client.call_json_tool('drive', 'read', {'path': 'a', 'n': 1}) == {'text': 'hi'}
        assert client.call_tool('drive', 'read', {}) == '{"text": "hi"}'
        """,
        parameters="x, judge, client",
    )
    report = grade(worker, code, SESSION, fixtures=CLIENT, session=session)
    assert report.passed, report.differences
    assert session.calls == [("drive", "read", {"path": "a", "n": 1}), ("drive", "read", {})]


@pytest.mark.parametrize(
    ("session", "body", "said"),
    [
        (None, "client.call_tool('drive', 'read', {})", "cannot be graded again from its evidence"),
        (
            FakeSession(ToolFault("it died")),
            "client.call_tool('drive', 'read', {})",
            "a server did not answer.*it died",
        ),
        (FakeSession({1}), "client.call_tool('drive', 'read', {})", "a server did not answer.*TypeError"),
        (FakeSession(3), "client.call_json_tool('drive', 'read', {})", "neither an object nor a list"),
        (FakeSession(3), "client.set_session('s-2')\nclient.call_tool('drive', 'read', {})", "no session s-2"),
        (FakeSession(3), "client.set_session(None)\nclient.call_tool('drive', 'read', {})", "set_session"),
    ],
)
def test_a_server_that_cannot_be_asked_is_a_fault(worker, session, body, said):
    code = code_of(f"client.set_session(x.session_id)\n{body}", parameters="x, judge, client")
    with pytest.raises(CheckFault, match=said):
        grade(worker, code, SESSION, fixtures=CLIENT, session=session)


def test_contexts_are_left_in_the_reverse_order(worker):
    fixtures = {name: {"type": "shop_fixtures.opened", "name": name} for name in ("inner", "outer")}
    report = grade(worker, code_of("pass", parameters="x, judge, outer, inner"), fixtures=fixtures)
    assert report.notes[-1] == "printed: enter outer enter inner leave inner leave outer"


@pytest.mark.parametrize(
    ("fixtures", "said"),
    [
        ({}, "the test function has a parameter 'shop', which is no fixture. There are: judge, x"),
        ({"shop": {"type": "shop"}}, "must be a dotted path"),
        ({"shop": {}}, "must be a dotted path"),
        ({"shop": {"type": "no_such.Thing"}}, "cannot be imported.*PYTHONPATH"),
        ({"shop": {"type": "shop_fixtures.asks_too_much"}}, "fixture 'shop' has a parameter 'colour'"),
        ({"shop": {"type": "shop_fixtures.Ledger", "size": 3}}, "cannot be made: TypeError"),
    ],
)
def test_a_fixture_that_cannot_be_made_says_why(worker, fixtures, said):
    with pytest.raises(CheckFault, match=said):
        grade(worker, code_of("pass", parameters="x, judge, shop"), fixtures=fixtures)


# --- processes ----------------------------------------------------------------------------------------------


@linux
def test_a_hundred_grades_leave_nothing_behind(worker):
    def held():
        children = len(
            subprocess.run(["ps", "--ppid", str(worker.pid), "-o", "pid="], capture_output=True).stdout.split()
        )
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir(f"/proc/{worker.pid}/fd")),
            threading.active_count(),
            children,
        )

    def one(number):
        match number % 4:
            case 0:
                grade(worker, code_of("assert judge.yesno('?')"), judge=YesJudge())
            case 1:
                assert not grade(worker, code_of("assert False")).passed
            case 2:
                with pytest.raises(CheckFault):
                    grade(worker, code_of("import os\nos.abort()"))
            case 3:  # what a test begins ends with it
                grade(worker, code_of("import subprocess\nsubprocess.Popen(['sleep', '60'])"))

    one(0)
    pid, before = worker.pid, held()
    for number in range(100):
        one(number)
    wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    assert worker.pid == pid


@linux
def test_closing_leaves_neither_process_nor_folder_and_the_worker_begins_again_when_needed():
    worker = CheckWorker()
    assert worker.pid is None  # not before it is needed
    (printed,) = grade(worker, code_of("import os\nprint(os.getcwd())")).notes
    pid, folder = worker.pid, os.path.dirname(printed.split()[1])
    assert is_running(pid) and os.path.isdir(folder)
    worker.close()
    worker.close()
    assert not is_running(pid) and not os.path.exists(folder) and worker.pid is None
    assert grade(worker, code_of("pass")).passed
    again = worker.pid
    del worker
    assert not is_running(again)


@linux
def test_a_worker_that_died_between_grades_is_replaced(worker):
    grade(worker, code_of("pass"))
    dead = worker.pid
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: not is_running(dead))
    assert grade(worker, code_of("pass")).passed
    assert worker.pid != dead


@linux
def test_a_worker_that_dies_in_a_grade_is_a_fault_and_takes_its_child_with_it(worker):
    begun = threading.Event()
    pids = []

    class Telling(YesJudge):
        def yesno(self, question):
            pids.append(int(question))
            begun.set()
            return True

    def run():
        code = code_of("import os, time\njudge.yesno(str(os.getpid()))\ntime.sleep(60)")
        with pytest.raises(CheckFault, match=r"ended its process .the check worker has ended"):
            grade(worker, code, judge=Telling())

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(run)
        assert begun.wait(20)
        os.kill(worker.pid, signal.SIGKILL)
        done.result(20)
    wait_until(lambda: not is_running(pids[0]))
    assert grade(worker, code_of("pass")).passed


@linux
def test_nothing_is_left_of_a_process_that_is_killed_in_a_grade(tmp_path):
    program = f"""
import sys
sys.path[:0] = [{os.path.dirname(__file__)!r}, {str(FIXTURE_MODULES)!r}]
from tbx_envs.thinkingbox.grading.judge import YesJudge
from tbx_envs.thinkingbox.grading.test_code import CheckWorker, entered_result
from tbx_envs.thinkingbox.supervision.program import MARK
from verdicts import code_of
class Telling(YesJudge):
    def yesno(self, question):
        print(worker.pid, question, flush=True)
        return True
worker = CheckWorker()
code = code_of("import os, time\\njudge.yesno(str(os.getpid()) + ' ' + os.getcwd())\\ntime.sleep(60)")
worker.grade(code, {{}}, fixtures={{}}, judge=Telling(), session=None, uid="a.py:test_it")
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid, child, folder = parent.stdout.readline().split()
        assert is_running(pid) and is_running(child) and os.path.isdir(folder)
        parent.kill()
    wait_until(lambda: not is_running(pid) and not is_running(child))
    assert not os.path.exists(os.path.dirname(folder))


@linux
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads: that is the point
@pytest.mark.filterwarnings("ignore:.*fork")  # other tests of this process have threads, JAX its own
def test_a_forked_process_has_a_worker_of_its_own_and_leaves_that_of_its_parent_alone(worker):
    grade(worker, code_of("pass"))
    pid = worker.pid
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ok = grade(worker, code_of("pass")).passed and worker.pid != pid
            worker.close()
            code = 0 if ok else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert grade(worker, code_of("pass")).passed and worker.pid == pid


# Ways to leave the process group of a test; each sleeps for a number of seconds by which it is found.
LEAVING = """
import os, subprocess, sys

def leave(seconds):
    sleep = [sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"]
    subprocess.Popen(sleep, start_new_session=True)
    for forks in (1, 2, 3):  # each parent ends at once, so that the last one is nobody's
        if os.fork() == 0:
            os.setsid()
            if all(os.fork() == 0 for _ in range(forks - 1)):
                os.execv(sleep[0], sleep)
            os._exit(0)
"""
seconds_of_tests = itertools.count(610_001)


def leaving(seconds, then):
    """A test that leaves four processes, asks the judge, and ends as it is told."""
    return code_of(f"{LEAVING}\nleave({seconds})\njudge.yesno('{seconds}')\n{then}")


def sleeping(seconds):
    """Ids of the living processes that sleep for that time."""
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:  # a zombie's is empty
            if f"time.sleep({seconds})".encode() in file.read():
                found.add(pid)
    return found


@linux
@pytest.mark.parametrize("end", ["pass", "assert False", "os.abort()", "1 / 0"])
def test_no_process_that_a_test_started_outlives_its_grade(worker, end):
    """Not even one that left the group and whose parents have ended; those of another grade live as long as it."""
    first, other = next(seconds_of_tests), next(seconds_of_tests)
    seen = {}

    class Looking(YesJudge):
        def yesno(self, question):
            wait_until(lambda: len(sleeping(question)) == 4)
            seen[question] = sleeping(question)
            if question == str(other):  # while this one runs, another comes and goes
                with contextlib.suppress(CheckFault):
                    grade(worker, leaving(first, end), judge=self)
                wait_until(lambda: not sleeping(first))
                assert sleeping(other) == seen[question]
            return True

    assert grade(worker, leaving(other, "pass"), judge=Looking()).passed
    assert set(seen) == {str(first), str(other)}
    wait_until(lambda: not sleeping(other))


@linux
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_no_process_that_a_test_started_outlives_its_worker(how):
    seconds = next(seconds_of_tests)
    with CheckWorker() as worker:

        class Ending(YesJudge):
            def yesno(self, question):
                wait_until(lambda: len(sleeping(seconds)) == 4)
                if how == "killed":
                    os.kill(worker.pid, signal.SIGKILL)
                else:
                    worker.close()
                return True

        with pytest.raises(CheckFault):
            grade(worker, leaving(seconds, "while 1: pass"), judge=Ending())
    wait_until(lambda: not sleeping(seconds))


@linux
def test_a_worker_that_is_stopped_is_asked_once_and_replaced(monkeypatch):
    monkeypatch.setattr(test_code, "SILENCE_S", 1.0)
    silences = []
    silence = test_code._Grading._silence
    monkeypatch.setattr(test_code._Grading, "_silence", lambda self: silences.append(1) or silence(self))
    stop = "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)"
    with CheckWorker() as worker:
        grade(worker, code_of("pass"))
        before = worker.pid
        os.kill(before, signal.SIGSTOP)
        assert [grade(worker, code_of("pass")).passed for _ in range(3)] == [True] * 3
        assert silences == [1] and worker.pid != before and not is_running(before)
        before = worker.pid
        assert grade(worker, code_of(stop)).passed  # the verdict was there; its end was not told any more
        assert grade(worker, code_of("pass")).passed
        assert silences == [1, 1] and worker.pid != before and not is_running(before)


def test_a_worker_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false" if os.path.exists("/bin/false") else "/usr/bin/false")
    with pytest.raises(CheckFault, match=r"check worker .* ended at once"):
        grade(CheckWorker(), code_of("pass"))


def test_evidence_that_fits_no_context_is_a_fault(worker):
    with pytest.raises(CheckFault, match="raised ValidationError"):
        grade(worker, code_of("pass"), {"messages": [{"T": "Text", "role": "nobody", "content": 3}]})


def test_big_evidence_with_every_kind_of_character_arrives_as_it_is(worker):
    text = "é\U0001f600\ud800\x00<>" * 200_000
    code = code_of("assert x.response == x.effects['shop']['text'] and len(x.response) == 1_200_000")
    assert grade(worker, code, {"response": text, "effects": {"shop": {"text": text}}}).passed


def test_an_endpoints_judge_is_asked_from_another_thread_once_for_each_question(worker):
    endpoint = SayingEndpoint("Yes")
    assert grade(
        worker, code_of("assert judge.yesno('a')\nassert judge.yesno('b')"), judge=EndpointJudge(endpoint)
    ).passed
    assert [messages[1]["content"] for messages, _, _ in endpoint.asked] == ["a", "b"]
