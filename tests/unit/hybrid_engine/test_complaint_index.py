"""Every complaint about hybrid engines that was read has a test that bears its number."""

import re

# Cases of DeepSpeed-Chat and DeepSpeed, and of other trainers, that concern generating from the
# weights in training. Their tests are called test_..._dscN_... and test_..._peersN_...
DSC = {1, 2, 3, 7, 16, 17, 18, 21, 22, 23, 24, 25, 26}
PEERS = {14, 18, 19, 21, 22, 23}


def test_every_complaint_is_a_named_test(repo_root):
    found: dict[str, set[int]] = {"dsc": set(), "peers": set()}
    for path in (repo_root / "tests").rglob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            for source, number in re.findall(r"_(dsc|peers)(\d+)", name):
                found[source].add(int(number))
    assert found["dsc"] >= DSC, sorted(DSC - found["dsc"])
    assert found["peers"] >= PEERS, sorted(PEERS - found["peers"])
