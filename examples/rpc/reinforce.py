"""Reinforcement learning: observers play, one agent decides and learns (REINFORCE on CartPole, in NumPy).

    python -m fastcoll.launch -n 3 examples/rpc/reinforce.py

Rank 0 has the agent, each other rank an observer with a cart of its own. The agent asks all observers for an episode at
once; at every step, the observer asks the agent for a decision. So calls run in both directions at the same time.
"""

import os

import numpy as np

from fastcoll import rpc

LIMIT = 200  # steps after which an episode is won
EPISODES, RATE, DISCOUNT = 60, 10.0, 0.99


class CartPole:
    """A cart that balances a pole: the equations of Barto, Sutton and Anderson (1983), 20 ms a step."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def reset(self):
        """Begin an episode: position, velocity, angle and angular velocity, all near 0."""
        self.state = self.random.uniform(-0.05, 0.05, 4)
        return self.state

    def step(self, right):
        """Push the cart to the right or to the left; return the new state, and whether the pole still stands."""
        _, speed, angle, spin = self.state
        sin, cos = np.sin(angle), np.cos(angle)
        push = ((10 if right else -10) + 0.05 * spin**2 * sin) / 1.1
        fall = (9.8 * sin - cos * push) / (2 / 3 - 0.05 * cos**2 / 1.1)
        drive = push - 0.05 * fall * cos / 1.1
        self.state = self.state + 0.02 * np.array([speed, drive, spin, fall])
        return self.state, abs(self.state[0]) < 2.4 and abs(self.state[2]) < 0.21


class Observer:
    """Plays episodes on its own rank."""

    def __init__(self):
        self.id = rpc.get_worker_info().id
        self.cart = CartPole(seed=self.id)

    def play(self, agent):
        """Play one episode with the decisions of the agent, an RRef; return how many steps the pole stood."""
        state, stands, steps = self.cart.reset(), True, 0
        while stands and steps < LIMIT:
            state, stands = self.cart.step(agent.rpc_sync().act(self.id, state))
            steps += 1
        return steps


class Agent:
    """A policy with four weights: the pole is pushed to the right with probability sigmoid(weights @ state)."""

    def __init__(self, observers):
        self.weights = np.zeros(4)
        self.played = {id: [] for id in observers}
        # A generator for each observer, so that the order of their calls makes no difference.
        self.random = {id: np.random.default_rng(100 + id) for id in observers}

    def act(self, observer, state):
        """Decide for an observer; keep the gradient of the decision's log probability."""
        probability = 1 / (1 + np.exp(-self.weights @ state))
        right = bool(self.random[observer].random() < probability)
        self.played[observer].append((right - probability) * state)
        return right

    def learn(self):
        """Increase the probability of decisions that were followed by more steps than usual."""
        gradient = np.zeros(4)
        values = {id: discounted(len(decisions)) for id, decisions in self.played.items()}
        usual = np.concatenate(list(values.values()))
        for id, decisions in self.played.items():
            advantage = (values[id] - usual.mean()) / (usual.std() + 1e-8)
            gradient += advantage @ np.array(decisions)
            decisions.clear()
        self.weights += RATE * gradient / len(usual)


def discounted(steps):
    """Return for each step of an episode the discounted number of steps that follow it."""
    return (1 - DISCOUNT ** np.arange(steps, 0, -1)) / (1 - DISCOUNT)


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc("agent" if rank == 0 else f"observer{rank}", rank=rank, world_size=size)
    if rank == 0:
        agent = Agent(range(1, size))
        me = rpc.RRef(agent)  # for the observers to call
        observers = [rpc.remote(f"observer{id}", Observer) for id in range(1, size)]
        history = []
        for episode in range(EPISODES):
            calls = [observer.rpc_async().play(me) for observer in observers]  # all play at once
            history.append(np.mean([call.wait() for call in calls]))
            agent.learn()
            if episode % 10 == 9:
                print(f"episodes {episode - 8} to {episode + 1}: {np.mean(history[-10:]):.0f} steps")
    rpc.shutdown()


if __name__ == "__main__":
    main()
