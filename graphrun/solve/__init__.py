"""Planner: find the fastest plan for a `Problem` within its budgets, or explain why none exists.

solve                from a problem to a simulated plan: calls the other modules
pages                plans within a budget counted in allocator pages
fastest              the fastest plan where memory is counted in bytes of tensors
orders               stage orders, and stage options (such as tiling), to choose from
granularity          components that are split into layers
dominance            variants (precision, backing store and compute device) worth solving for
program, programs    integer variables and constants of a plan; the program of a problem
rows                 seconds and bytes of a slot, as linear expressions or as exact numbers
columns, milp        the MILP: its variables and all other constraints; its goals and budgets
split_columns        the variables of components that are split over devices
linear               linear expressions, and HiGHS
search, sessions     goals in order: seconds, bytes moved, memory; sessions run by run
strategies           switches of the heuristics
actions              a plan from the integers
baselines            fixed strategies for comparison
transitions          a session plan that starts with the blocks of another plan
least                minimum budgets
infeasible           budgets that are too small, and by how much
suggestions          changes after which a plan exists, or is faster
alternatives         the plan with a component placed differently
frontier             one problem at many budgets
fits                 the fastest choice in each class of precisions
interrupts           the best plan so far when Ctrl-C ends planning
"""
