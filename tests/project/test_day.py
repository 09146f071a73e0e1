"""`make test` runs a case of each function, and all of what has the mark `day`."""


class Item:
    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name):
        return name if name in self.marks else None


def test_a_function_has_the_same_case_each_day(pytestconfig):
    plugins = pytestconfig.pluginmanager.get_plugins()
    (of_the_day,) = [p.of_the_day for p in plugins if hasattr(p, "of_the_day")]
    cases = [Item(f"a.py::test_a[{i}]") for i in range(9)]
    table = [Item(f"a.py::test_b[{i}]", "day", "slow") for i in range(3)]
    others = [Item("a.py::test_c", "slow"), Item("a.py::test_d[gpu]", "cuda")]
    found = of_the_day([*cases, *table, *others])
    (case,) = found - set(table)
    assert found > set(table) and case in cases
    assert of_the_day(cases[::-1]) == of_the_day([case, *cases[:4]]) == {case}
