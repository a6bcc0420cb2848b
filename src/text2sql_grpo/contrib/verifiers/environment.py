"""The package's environment: one agent, on this machine unless told otherwise."""

import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]


class SQLEnvConfig(vf.SingleAgentEnvConfig):
    """`SingleAgentEnv`'s, without a sandbox: what the model writes runs in the executor's workers alone."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class SQLEnv(vf.SingleAgentEnv, vf.Env[SQLEnvConfig]):
    """`SingleAgentEnv` whose runtime is not a cloud sandbox by default."""
