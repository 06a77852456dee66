from headrace.config import load_config
from headrace.deploy.plan import Entries, Shared, box_specs, plan_units, total_cpus


def shared(*overrides: str) -> Shared:
    return Shared(config=load_config(None, overrides), run_dir="/run", token="t", layout=None, fingerprint=b"f")


def test_units_follow_the_configuration() -> None:
    plans = plan_units(load_config(None, ["prefill.groups=2", "prefill.cp=4", "decode.dp=3"]), Entries())
    assert [(p.name, p.world) for p in plans] == [
        ("node-0", 1),
        ("prefill-0", 4),
        ("prefill-1", 4),
        ("decode-0", 3),
        ("router", 1),
    ]
    assert plans[-1].after == ("node-0", "prefill-0", "prefill-1", "decode-0")
    assert total_cpus(plans) == 11.5


def test_ranks_share_devices_when_there_are_fewer() -> None:
    plans = {p.name: p.gpus for p in plan_units(load_config(), Entries(), gpus=2)}
    assert plans == {"node-0": 0, "prefill-0": 0.5, "decode-0": 0.5, "router": 0}
    assert plan_units(load_config(), Entries(), gpus=8)[1].gpus == 1.0


def test_every_start_of_a_group_has_its_own_generation_and_rendezvous() -> None:
    common = shared()
    plan = plan_units(common.config, Entries())[2]
    first, second = box_specs(plan, common, {}), box_specs(plan, common, {})
    assert [s.context.name for s in first] == ["decode-0.0", "decode-0.1"]
    assert {s.context.group for s in first} == {"decode-0"}
    assert len({s.context.generation for s in first}) == 1
    assert first[0].context.rendezvous == first[1].context.rendezvous != second[0].context.rendezvous
    assert first[0].context.generation != second[0].context.generation


def test_a_restarted_router_keeps_its_port() -> None:
    common = shared("router.port=0")
    router = plan_units(common.config, Entries())[-1]
    assert box_specs(router, common, {})[0].context.config.router.port == 0
    again = box_specs(router, common, {"router": "http://127.0.0.1:4711"})
    assert again[0].context.config.router.port == 4711
    assert again[0].context.rendezvous == ""
