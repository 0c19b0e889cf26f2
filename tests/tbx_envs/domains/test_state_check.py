import pytest
from sqlalchemy import insert, update

from tbx_envs.domains.state_check import check_state
from tbx_envs.domains.worlds import lend_world, replay, return_world, template_for
from tbx_envs.testing.kiosk import ITEMS, NOTES


@pytest.fixture
def world_and_template(kiosk):
    template = template_for(kiosk.task("kiosk/order/001"), kiosk)
    world = lend_world(template)
    yield world, template
    return_world(world)


def test_the_expected_calls_pass_and_doing_nothing_fails(world_and_template):
    world, template = world_and_template
    idle = check_state(world, template)
    assert not idle.passed and idle.differences
    replay(world, template.task, template.domain)
    report = check_state(world, template)
    assert report.passed and report.check == "state" and report.differences == ()


def test_one_row_too_many_fails(world_and_template):
    world, template = world_and_template
    replay(world, template.task, template.domain)
    world.db.execute(insert(NOTES), {"text": "order for 1037"})
    world.db.commit()
    assert check_state(world, template).differences == ("notes: a row is unexpected (text='order for 1037')",)


def test_what_was_never_committed_does_not_count(world_and_template):
    world, template = world_and_template
    replay(world, template.task, template.domain)
    world.db.execute(update(ITEMS).values(stock=0))
    assert check_state(world, template).passed
