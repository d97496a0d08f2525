"""When: a `Problem` of pure numbers in, a `Plan` out. Knows no torch, no file, no clock; importing this imports no solver.

solve.solve(problem) -> Solution        simulate.simulate(problem, plan) -> Simulation
plan.parse(text) -> Plan                check.check(problem, plan) -> violations
"""
