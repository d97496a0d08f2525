"""Data types of planning, and pure functions on them. No torch, no I/O, no solver.

graphrun.solve.solve.solve(problem)                 -> Solution
graphrun.model.plan.parse(text)                     -> Plan
graphrun.verify.check.check(problem, plan)          -> violated rules
graphrun.verify.simulate.simulate(problem, plan)    -> Simulation: bytes and seconds
"""
