"""The package's environment: one agent, by default on this machine."""

import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]


class SQLEnvConfig(vf.SingleAgentEnvConfig):
    """Config of `SingleAgentEnv` without a sandbox: the model's SQL runs only in the executor's workers."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class SQLEnv(vf.SingleAgentEnv, vf.Env[SQLEnvConfig]):
    """`SingleAgentEnv` whose runtime is not a cloud sandbox by default."""
