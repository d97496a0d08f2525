"""The planner: from a `Problem` to the fastest plan within its budgets, or to an explanation why
there is none.

orders        stage orders and stage options to choose from       variants     variants worth
solving for program       integers, constraints and costs of a plan           granularity  which
components are split into layers milp          the program as rows and columns
search       goals in order: seconds, bytes moved, memory linear        linear expressions, and
HiGHS actions       a plan's text from the integers                     solve        all of it,
judged by the simulator infeasible    what does not fit, and why                          least
the smallest budgets repairs       changes after which a plan exists                   remedies
those that take another dry run baselines     fixed strategies for comparison
frontier     one problem at many budgets alternatives  the plan with a component placed differently
advice        what would make a slow plan faster                interrupts   the best plan so far,
where Ctrl-C ends planning
"""
