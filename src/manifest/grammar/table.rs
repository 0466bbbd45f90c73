//! Field table of the grammar: one line per field, excluded from rustfmt so that its columns stay aligned.

use super::{API_VERSION, ANY_COUNT, AUTO_TYPE, CYCLE_SECONDS, EFFECTS, EXIT_CODES, HEALTH_RETRIES, INSTANCES, KINDS, DISRUPTIONS, LOGS_KEPT, NICE, ON_HOOK_FAILURE, OOM_SCORE_ADJ, PAUSES, PROCESS_TYPES, PROTECTIONS, PROTECT_SYSTEM, RESTART_POLICIES, RETRIES, SECONDS, SIGNAL_NAMES, SMALL_COUNT, START_MODES, STATES};
use super::{Entry, Requirement, Section, Shape, FieldOrigin};
use super::Requirement::{IgnoredInBody, Optional, Required, RequiredInBody};
use super::Shape::{AbsolutePath, Amount, Bool, Duration, Int, Ip, List, LooseText, Map, Name, Number, OneOf, Percent, Size, Text, Word};

pub(super) const fn entry(name: &'static str, shape: Shape, need: Requirement, source: FieldOrigin, meaning: &'static str) -> Entry {
    Entry { name, aliases: &[], shape, need, default: None, meaning, source }
}

impl Entry {
    pub(super) const fn with_default(mut self, default: &'static str) -> Entry {
        self.default = Some(default);
        self
    }

    const fn alias(mut self, aliases: &'static [&'static str]) -> Entry {
        self.aliases = aliases;
        self
    }
}

pub(super) const KIND: Entry = entry("kind", Word(KINDS), Optional, FieldOrigin::Abide, "Kind of object that the document declares.").with_default("Process");
pub(super) const VERSION: Entry =
    entry("apiVersion", Word(&[API_VERSION]), Optional, FieldOrigin::Abide, "Version of the manifest syntax.").with_default("abide/v1");

/// Variables by name.
pub(super) const VARS: Shape = Map(&OneOf(&[Text, Int(i64::MIN..=i64::MAX), Number, Bool]));

pub static PROCESS: Section = Section {
    name: "Process",
    about: "A process on one or more hosts. A GSE request body {meta, hosts, spec} is also read as a Process.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&META), Required, FieldOrigin::Gse, "Name and labels of the process."),
        entry("hosts", List(&OneOf(&[Text, Shape::Section(&HOST)])), Required, FieldOrigin::GseAndJob, "Hosts and host groups that the process runs on, in any combination. A host may be text: IP, or CLOUD:IP."),
        entry("run", Text, Optional, FieldOrigin::Abide, "Command that is the process. Short for spec.control.start_cmd, with start_mode foreground unless `mode` is set. With it, proc_name, setup_path, pid_path and value_key may be left out."),
        entry("dir", AbsolutePath, Optional, FieldOrigin::Abide, "Working directory. Short for spec.identity.setup_path.").with_default("/, with `run`"),
        entry("user", Text, Optional, FieldOrigin::Abide, "Account. Short for spec.identity.user."),
        entry("mode", Word(START_MODES), Optional, FieldOrigin::Abide, "Short for spec.control.start_mode.").with_default("foreground, with `run`"),
        entry("type", Word(PROCESS_TYPES), Optional, FieldOrigin::Abide, "service: kept running; schedule: runs by `schedule`; job: runs once. Short for spec.monitor_policy.auto_type (1, 0, 2).").with_default("service, or schedule with `schedule`"),
        entry("schedule", Text, Optional, FieldOrigin::Abide, "minute hour day-of-month month day-of-week. Short for spec.monitor_policy.crontab_rule; implies type: schedule."),
        entry("zone", Text, Optional, FieldOrigin::Abide, "Short for spec.monitor_policy.crontab_zone."),
        entry("env", Map(&OneOf(&[LooseText, Shape::Section(&ENV)])), Optional, FieldOrigin::Abide, "Short for spec.env."),
        entry("state", Word(STATES), Optional, FieldOrigin::Abide, "Desired state: running (supervised by the agent), stopped, unhosted (running, not supervised) or absent.").with_default("running"),
        entry("instances", Int(INSTANCES), Optional, FieldOrigin::Abide, "Number of instances per host, named NAME_1 to NAME_N; ${instance} is the number. Unset: one instance, named NAME."),
        entry("depends_on", List(&Text), Optional, FieldOrigin::Abide, "Processes that must be ready before this one starts, as NAMESPACE/NAME, or NAME in the same namespace: services healthy, one-shots ended with success. Affects order only, never causes a restart."),
        entry("protect", List(&Word(PROTECTIONS)), Optional, FieldOrigin::Abide, "Operations that Abide never performs on the process, in any plan."),
        entry("adopt", Bool, Optional, FieldOrigin::Abide, "Take ownership of a running process that has no owner, without a restart.").with_default("false"),
        entry("moved_from", Text, Optional, FieldOrigin::Abide, "Previous name of the process, as NAMESPACE/NAME or NAME. Renames it without a restart."),
        entry("on_change", Map(&Word(EFFECTS)), Optional, FieldOrigin::Abide, "Effect of a change on this process, per field path, or env.NAME for one variable. Overrides the effect that `abide explain FIELD` shows."),
        entry("rollout", Shape::Section(&ROLLOUT), Optional, FieldOrigin::Abide, "How a change rolls out across the instances. Unset: all instances at once, within the budgets."),
        entry("spec", Shape::Section(&SPEC), Optional, FieldOrigin::Gse, "Specification of the process: identity, commands, limits and supervision. Required without `run`."),
        entry("stop_signal", Word(SIGNAL_NAMES), Optional, FieldOrigin::Abide, "Short for spec.control.stop_signal."),
        entry("stop_timeout", Duration, Optional, FieldOrigin::Abide, "Short for spec.control.stop_timeout."),
        entry("reload_signal", Word(SIGNAL_NAMES), Optional, FieldOrigin::Abide, "Short for spec.control.reload_signal."),
        entry("health", OneOf(&[Text, Shape::Section(&HEALTH)]), Optional, FieldOrigin::Abide, "Short for spec.health."),
        entry("restart", OneOf(&[Word(RESTART_POLICIES), Shape::Section(&RESTART)]), Optional, FieldOrigin::Abide, "Short for spec.restart."),
        entry("log", Shape::Section(&LOG), Optional, FieldOrigin::Abide, "Short for spec.log."),
        entry("limits", Shape::Section(&LIMITS), Optional, FieldOrigin::Abide, "Short for spec.limits."),
        entry("env_file", AbsolutePath, Optional, FieldOrigin::Abide, "Short for spec.env_file."),
        entry("sandbox", Shape::Section(&SANDBOX), Optional, FieldOrigin::Abide, "Short for spec.sandbox."),
        entry("hooks", Shape::Section(&HOOKS), Optional, FieldOrigin::Abide, "Short for spec.hooks."),
        entry("op_type", Int(0..=9), IgnoredInBody, FieldOrigin::GseOperate, "Operation code of a pasted request; ignored. Set `state` instead."),
        entry("bk_app_code", Text, IgnoredInBody, FieldOrigin::GseAndJob, "Application code of a pasted request; ignored. Set it in the target's configuration."),
        entry("bk_app_secret", Text, IgnoredInBody, FieldOrigin::GseAndJob, "Application secret of a pasted request; ignored. Set it in the target's configuration."),
        entry("bk_token", Text, IgnoredInBody, FieldOrigin::GseAndJob, "User token of a pasted request; ignored. Set it in the target's configuration."),
        entry("bk_username", Text, IgnoredInBody, FieldOrigin::GseAndJob, "User name of a pasted request; ignored. Set it in the target's configuration."),
    ],
};

static META: Section = Section {
    name: "meta",
    about: "Name and labels of the process.",
    entries: &[
        entry("namespace", Name, Required, FieldOrigin::Gse, "Namespace of the process; with `name` it identifies the process. No `:`, `/` or whitespace, at most 128 characters."),
        entry("name", Name, Required, FieldOrigin::Gse, "Name of the process in its namespace, independent of its program. No `:`, `/` or whitespace, at most 128 characters."),
        entry("labels", Map(&LooseText), Optional, FieldOrigin::Gse, "Labels to select the process by, as name: text. Names that begin with abide_ are reserved."),
    ],
};

static HOST: Section = Section {
    name: "hosts[]",
    about: "A host by address or agent id, or a group of hosts.",
    entries: &[
        entry("ip", Text, Optional, FieldOrigin::GseAndJob, "IPv4 or IPv6 address of the host; with bk_cloud_id it identifies the host."),
        entry("bk_cloud_id", Int(ANY_COUNT), Optional, FieldOrigin::GseAndJob, "Id of the cloud area of `ip`; 0 is the default area. Required with `ip`."),
        entry("bk_supplier_id", Int(ANY_COUNT), Optional, FieldOrigin::GseRegister, "Supplier id, for GSE 1.0."),
        entry("bk_agent_id", Text, Optional, FieldOrigin::Abide, "Id of the host's GSE 2.0 agent, instead of `ip` or in addition to it."),
        entry("group", Text, Optional, FieldOrigin::Abide, "Name of a HostGroup. Selects all of its hosts, or those that match `labels`."),
        entry("labels", Text, Optional, FieldOrigin::Abide, "Label selector for the hosts of `group`, such as rack=a,tier in (x,y),!old."),
        entry("vars", VARS, Optional, FieldOrigin::Abide, "Variables of this host, used as ${NAME}."),
    ],
};

static GROUP_HOST: Section = Section {
    name: "hosts[]",
    about: "A host of the group, by address or agent id.",
    entries: &[
        entry("ip", Text, Optional, FieldOrigin::GseAndJob, "IPv4 or IPv6 address of the host; with bk_cloud_id it identifies the host."),
        entry("bk_cloud_id", Int(ANY_COUNT), Optional, FieldOrigin::GseAndJob, "Id of the cloud area of `ip`; 0 is the default area. Required with `ip`."),
        entry("bk_supplier_id", Int(ANY_COUNT), Optional, FieldOrigin::GseRegister, "Supplier id, for GSE 1.0."),
        entry("bk_agent_id", Text, Optional, FieldOrigin::Abide, "Id of the host's GSE 2.0 agent, instead of `ip` or in addition to it."),
        entry("labels", Map(&LooseText), Optional, FieldOrigin::Abide, "Labels of the host, for the selectors of a Process."),
        entry("vars", VARS, Optional, FieldOrigin::Abide, "Variables of this host, used as ${NAME}. They win over those of the group."),
    ],
};

static ROLLOUT: Section = Section {
    name: "rollout",
    about: "How a change rolls out across the instances of the process.",
    entries: &[
        entry("batch", Amount, Optional, FieldOrigin::Abide, "Maximum number or share of instances that change at a time. Unset: all instances after the canary."),
        entry("canary", Amount, Optional, FieldOrigin::Abide, "Number or share of instances that change first. Unset or 0: no canary."),
        entry("soak", Duration, Optional, FieldOrigin::Abide, "Time that a batch must stay healthy before the next batch starts. Unset: no soak time."),
        entry("max_failures", Int(ANY_COUNT), Optional, FieldOrigin::Abide, "Number of failed instances that the rollout tolerates; one more stops it. Unset: 0."),
        entry("auto_rollback", Bool, Optional, FieldOrigin::Abide, "Restore the last healthy spec when the rollout stops.").with_default("false"),
        entry("order", List(&Text), Optional, FieldOrigin::Abide, "Host groups in the order of the rollout: one group is done before the next. Hosts of none come last. Shares in `batch` are then of a group."),
        entry("max_unavailable", Amount, Optional, FieldOrigin::Abide, "Maximum number or share of unavailable instances per group, or of all without `order`. Instances that are down already count."),
        entry("pause", Word(PAUSES), Optional, FieldOrigin::Abide, "`promoted`: wait for `abide rollout promote` after the canary and after each group."),
    ],
};

static SPEC: Section = Section {
    name: "spec",
    about: "Specification of the process: identity, commands, limits and supervision.",
    entries: &[
        entry("identity", Shape::Section(&IDENTITY), Required, FieldOrigin::Gse, "How the agent identifies the process."),
        entry("control", Shape::Section(&CONTROL), Optional, FieldOrigin::Gse, "Commands that operate on the process."),
        entry("resource", Shape::Section(&RESOURCE), Optional, FieldOrigin::GseRegister, "Resource limits. Unset: no limit."),
        entry("monitor_policy", Shape::Section(&MONITOR), Optional, FieldOrigin::Gse, "How the agent supervises the process: checks, retries, schedule and timeouts.").alias(&["alive_monitor_policy"]),
        entry("warn_report_policy", Shape::Section(&WARN), Optional, FieldOrigin::Gse, "How alarms are reported."),
        entry("configmap", List(&Shape::Section(&CONFIG)), Optional, FieldOrigin::Gse, "Files that the process reads, with the md5 digests that they should have. Abide does not copy files."),
        entry("env", Map(&OneOf(&[LooseText, Shape::Section(&ENV)])), Optional, FieldOrigin::Abide, "Environment variables: text, {file: PATH} or {exec: [PROGRAM, ARGUMENT…]} read by the agent at each start, or {value: TEXT, secret: true}. Variables such as ${host.ip} are replaced."),
        entry("job", Shape::Section(&JOB), Optional, FieldOrigin::Job, "Fields that only requests of JOB have."),
        entry("health", OneOf(&[Text, Shape::Section(&HEALTH)]), Optional, FieldOrigin::Abide, "Health check by the agent: an http:// URL, tcp://HOST:PORT or a command, or a map."),
        entry("restart", OneOf(&[Word(RESTART_POLICIES), Shape::Section(&RESTART)]), Optional, FieldOrigin::Abide, "When the agent restarts a resident process that exited.").with_default("always"),
        entry("log", Shape::Section(&LOG), Optional, FieldOrigin::Abide, "Rotation of the log of a foreground process. Unset: the log is not rotated."),
        entry("limits", Shape::Section(&LIMITS), Optional, FieldOrigin::Abide, "Absolute resource limits, in addition to `resource`."),
        entry("env_file", AbsolutePath, Optional, FieldOrigin::Abide, "File of KEY=VALUE lines that the agent reads at each start, with the rights of `user`. `env` overrides its values."),
        entry("sandbox", Shape::Section(&SANDBOX), Optional, FieldOrigin::Abide, "Restrictions of the process and of its commands, in the words of systemd.exec. A restriction that the host cannot enforce fails the start."),
        entry("hooks", Shape::Section(&HOOKS), Optional, FieldOrigin::Abide, "Commands that the agent runs around an operation."),
    ],
};

static HEALTH: Section = Section {
    name: "health",
    about: "Health check by the agent. Set exactly one of cmd, http and tcp.",
    entries: &[
        entry("cmd", Text, Optional, FieldOrigin::Abide, "Command that exits with 0 if the process is healthy."),
        entry("http", Text, Optional, FieldOrigin::Abide, "URL with http://. Healthy: a status from 200 to 399."),
        entry("tcp", Text, Optional, FieldOrigin::Abide, "HOST:PORT. Healthy: the connection is accepted."),
        entry("start_period", Duration, Optional, FieldOrigin::Abide, "Time after a start in which failed probes do not count. Unset: 30s, or start_check_secs if that is longer."),
        entry("interval", Duration, Optional, FieldOrigin::Abide, "Time between two probes.").with_default("10s"),
        entry("timeout", Duration, Optional, FieldOrigin::Abide, "Time limit of one probe.").with_default("5s"),
        entry("retries", Int(HEALTH_RETRIES), Optional, FieldOrigin::Abide, "Failed probes in a row that make the process Degraded.").with_default("3"),
    ],
};

static RESTART: Section = Section {
    name: "restart",
    about: "When the agent restarts a resident process that exited.",
    entries: &[
        entry("policy", Word(RESTART_POLICIES), Optional, FieldOrigin::Abide, "always: after every exit; on-failure: after a failure; never: not at all.").with_default("always"),
        entry("attempts", Int(RETRIES), Optional, FieldOrigin::Abide, "Restart attempts before the process counts as failed. Unset: start_retries."),
        entry("success_codes", List(&Int(EXIT_CODES)), Optional, FieldOrigin::Abide, "Exit codes that count as success, in addition to 0."),
    ],
};

static LOG: Section = Section {
    name: "log",
    about: "Rotation of the log of a foreground process (log_path).",
    entries: &[
        entry("max_size", Size, Optional, FieldOrigin::Abide, "Size at which the log is rotated.").with_default("10MB"),
        entry("keep", Int(LOGS_KEPT), Optional, FieldOrigin::Abide, "Number of rotated files that are kept.").with_default("5"),
    ],
};

static LIMITS: Section = Section {
    name: "limits",
    about: "Absolute resource limits of the process and its children.",
    entries: &[
        entry("memory", Size, Optional, FieldOrigin::Abide, "Memory limit."),
        entry("cpu", Number, Optional, FieldOrigin::Abide, "Limit in processor cores, such as 1.5."),
    ],
};

static SANDBOX: Section = Section {
    name: "sandbox",
    about: "Restrictions of the process and of its commands, in the words of systemd.exec.",
    entries: &[
        entry("no_new_privs", Bool, Optional, FieldOrigin::Abide, "The process and its children gain no privileges, for example by setuid programs."),
        entry("capabilities", List(&Text), Optional, FieldOrigin::Abide, "Capability bounding set, such as [CAP_NET_BIND_SERVICE]. An empty list allows none."),
        entry("umask", Text, Optional, FieldOrigin::Abide, "File mode creation mask, as octal text such as \"0027\"."),
        entry("nice", Int(NICE), Optional, FieldOrigin::Abide, "Scheduling priority."),
        entry("oom_score_adj", Int(OOM_SCORE_ADJ), Optional, FieldOrigin::Abide, "Adjustment of the score by which the kernel chooses a process to kill."),
        entry("ulimits", Map(&OneOf(&[Int(ANY_COUNT), Text])), Optional, FieldOrigin::Abide, "Resource limits by name, such as nofile: 65536: a number, infinity, or soft and hard limit as \"1024:65536\"."),
        entry("private_tmp", Bool, Optional, FieldOrigin::Abide, "The process has its own, empty /tmp and /var/tmp."),
        entry("read_only_paths", List(&AbsolutePath), Optional, FieldOrigin::Abide, "Paths that the process cannot write to."),
        entry("protect_system", OneOf(&[Bool, Word(PROTECT_SYSTEM)]), Optional, FieldOrigin::Abide, "Read-only system directories. true: /usr and /boot; full: also /etc; strict: everything but /dev, /proc and /sys."),
    ],
};

static HOOKS: Section = Section {
    name: "hooks",
    about: "Commands that the agent runs around an operation.",
    entries: &[
        entry("before_start", OneOf(&[Text, Shape::Section(&LAUNCH_HOOK)]), Optional, FieldOrigin::Abide, "Runs before every launch. A failure fails the launch."),
        entry("before_stop", OneOf(&[Text, Shape::Section(&HOOK)]), Optional, FieldOrigin::Abide, "Runs before a stop and before the stop of a restart. A failure keeps the process running. Not before a kill."),
        entry("after_start", OneOf(&[Text, Shape::Section(&HOOK)]), Optional, FieldOrigin::Abide, "Runs after the start check of a start or restart. A failure fails the start, and stops the process."),
    ],
};

static LAUNCH_HOOK: Section = Section {
    name: "launch hook",
    about: "A command before every launch, with its time limit.",
    entries: &[
        entry("run", Text, Required, FieldOrigin::Abide, "Command, run in setup_path as `user`. It may run more than once per launch."),
        entry("timeout", Duration, Optional, FieldOrigin::Abide, "Time limit. Unset: op_timeout."),
        entry("on_failure", Word(ON_HOOK_FAILURE), Optional, FieldOrigin::Abide, "abort: the launch fails. ignore: the launch continues.").with_default("abort"),
    ],
};

static HOOK: Section = Section {
    name: "hook",
    about: "A command around an operation, with its time limit. Only for services.",
    entries: &[
        entry("run", Text, Required, FieldOrigin::Abide, "Command, run in setup_path as `user`. It may run more than once per operation."),
        entry("timeout", Duration, Optional, FieldOrigin::Abide, "Time limit, at most 1h. Unset: op_timeout."),
        entry("on_failure", Word(ON_HOOK_FAILURE), Optional, FieldOrigin::Abide, "abort: the operation fails. ignore: the operation continues, and the agent logs the failure.").with_default("abort"),
        entry("drift", Bool, Optional, FieldOrigin::Abide, "Also run for the repair of drift: relaunches by the agent, and operations of watch without a change of the manifests.").with_default("false"),
    ],
};

static IDENTITY: Section = Section {
    name: "identity",
    about: "How the agent identifies the process.",
    entries: &[
        entry("proc_name", Text, Required, FieldOrigin::GseAndJob, "Name of the executable, as /proc/PID/exe shows it."),
        entry("setup_path", AbsolutePath, Required, FieldOrigin::GseAndJob, "Working directory of all commands. It must exist; Abide does not create it."),
        entry("pid_path", AbsolutePath, Required, FieldOrigin::GseAndJob, "Pid file of the process. `user` needs write access to its directory."),
        entry("config_path", AbsolutePath, Optional, FieldOrigin::GseAndJob, "Configuration file of the process (JOB: cfg_path)."),
        entry("log_path", AbsolutePath, Optional, FieldOrigin::GseAndJob, "Log file of the process; in foreground mode, the agent writes the process's output to it. `user` needs write access."),
        entry("user", Text, RequiredInBody, FieldOrigin::GseAndJob, "Account that the process runs as (JOB: account). Unset: the agent's own user, on the local target only."),
        entry("value_key", Text, Optional, FieldOrigin::GseAndJob, "Key that distinguishes the processes of one host. Required if two of them share setup_path and proc_name.").alias(&["index_key"]).with_default("setup_path + proc_name"),
    ],
};

static CONTROL: Section = Section {
    name: "control",
    about: "Commands that operate on the process. The shell runs them in setup_path, as `user`.",
    entries: &[
        entry("start_cmd", Text, Optional, FieldOrigin::GseAndJob, "Command that starts the process. Required if `state` needs a start."),
        entry("stop_cmd", Text, Optional, FieldOrigin::GseAndJob, "Command that stops the process. Unset: Abide's agent sends TERM, then KILL after stop_check_secs."),
        entry("restart_cmd", Text, Optional, FieldOrigin::GseAndJob, "Command that restarts the process. Unset: stop, then start."),
        entry("reload_cmd", Text, Optional, FieldOrigin::GseAndJob, "Command that makes the process reread its configuration under the same pid. Unset: such changes restart it."),
        entry("kill_cmd", Text, Optional, FieldOrigin::GseAndJob, "Command that kills the process. Unset: Abide's agent sends KILL."),
        entry("version_cmd", Text, Optional, FieldOrigin::Gse, "Command that prints the version of the process."),
        entry("health_cmd", Text, Optional, FieldOrigin::Gse, "Health check. Exits with 0 if the process is healthy."),
        entry("start_mode", Word(START_MODES), Optional, FieldOrigin::Abide, "daemon: start_cmd leaves a background process that writes its pid file; foreground: start_cmd is the process.").with_default("daemon"),
        entry("stop_signal", Word(SIGNAL_NAMES), Optional, FieldOrigin::Abide, "Signal that stops the process, if it has no stop_cmd. Unset: TERM."),
        entry("stop_timeout", Duration, Optional, FieldOrigin::Abide, "Time limit for a stop; then the remaining processes are killed. Unset: stop_check_secs."),
        entry("reload_signal", Word(SIGNAL_NAMES), Optional, FieldOrigin::Abide, "Signal that makes the process reread its configuration, if it has no reload_cmd."),
    ],
};

static RESOURCE: Section = Section {
    name: "resource",
    about: "Resource limits of the process. The agent stops a process that exceeds cpu or mem.",
    entries: &[
        entry("cpu", Percent, Optional, FieldOrigin::GseAndJob, "CPU limit, in percent of the whole host (JOB: cpu_lmt). Unset or 0: no limit."),
        entry("mem", Percent, Optional, FieldOrigin::GseAndJob, "Memory limit, in percent of the whole host (JOB: mem_lmt). Unset or 0: no limit."),
        entry("fd", Int(ANY_COUNT), Optional, FieldOrigin::GseRegister, "Maximum number of open files. Reserved by GSE."),
        entry("disk", Int(ANY_COUNT), Optional, FieldOrigin::GseRegister, "Disk space limit. Reserved by GSE."),
        entry("net", Int(ANY_COUNT), Optional, FieldOrigin::GseRegister, "Network traffic limit. Reserved by GSE."),
    ],
};

static MONITOR: Section = Section {
    name: "monitor_policy",
    about: "How the agent supervises the process: checks, retries, schedule and timeouts.",
    entries: &[
        entry("auto_type", Int(AUTO_TYPE), RequiredInBody, FieldOrigin::GseAndJob, "Process type: 0 periodic (runs by crontab_rule or job.cycle_time), 1 resident (restarted when it exits), 2 one-shot (runs once; JOB: type).").with_default("1"),
        entry("start_check_secs", Int(SECONDS), Optional, FieldOrigin::Gse, "Time between a start and the check that the process still runs, in seconds.").with_default("5"),
        entry("stop_check_secs", Int(SECONDS), Optional, FieldOrigin::Gse, "Time limit for a stop, in seconds. Unset: 10 with Abide's agent."),
        entry("start_retries", Int(RETRIES), Optional, FieldOrigin::Gse, "Number of restart attempts for an exited process before it counts as failed.").with_default("4"),
        entry("start_interval", Int(SECONDS), Optional, FieldOrigin::Gse, "Time between two restart attempts, in seconds.").with_default("10"),
        entry("crontab_rule", Text, Optional, FieldOrigin::Gse, "Schedule of a periodic process: minute hour day-of-month month day-of-week.").alias(&["crotab_rule"]),
        entry("crontab_zone", Text, Optional, FieldOrigin::Abide, "Time zone of crontab_rule, such as Asia/Shanghai. Unset: the host's time zone."),
        entry("op_timeout", Int(SECONDS), Optional, FieldOrigin::GseOperate, "Time limit for one command, in seconds.").with_default("60"),
    ],
};

static WARN: Section = Section {
    name: "warn_report_policy",
    about: "How alarms are reported.",
    entries: &[entry("report_id", Int(i64::MIN..=i64::MAX), Optional, FieldOrigin::Gse, "Id that alarms are reported under.")],
};

static CONFIG: Section = Section {
    name: "configmap[]",
    about: "A file that the process reads.",
    entries: &[
        entry("path", AbsolutePath, Optional, FieldOrigin::Gse, "Path of the file."),
        entry("md5", Text, Optional, FieldOrigin::Gse, "Expected md5 digest of the file, 32 hex digits."),
    ],
};

static ENV: Section = Section {
    name: "env value",
    about: "An environment variable that is read from a file or a program, or is secret.",
    entries: &[
        entry("file", AbsolutePath, Optional, FieldOrigin::Abide, "File that the agent reads at each start. The value appears in no plan, store or log."),
        entry("exec", List(&Text), Optional, FieldOrigin::Abide, "Program and arguments. The agent runs them as the user of the process at each start, within 10 s; the value is the output, at most 64 KiB, without a final line break. The host policy must have `env_exec: true`."),
        entry("value", LooseText, Optional, FieldOrigin::Abide, "Value of the variable."),
        entry("secret", Bool, Optional, FieldOrigin::Abide, "Show a digest instead of the value.").with_default("false"),
    ],
};

static JOB: Section = Section {
    name: "job",
    about: "Fields that only requests of JOB have.",
    entries: &[
        entry("proc_owner", Text, Optional, FieldOrigin::Job, "Person responsible for the process (operate_process: contact)."),
        entry("func_id", Text, Optional, FieldOrigin::Job, "Function id in CMDB."),
        entry("instance_id", Text, Optional, FieldOrigin::Job, "Instance id in CMDB."),
        entry("instance_num", Int(SMALL_COUNT), Optional, FieldOrigin::Job, "Number of instances."),
        entry("cycle_time", Int(CYCLE_SECONDS), Optional, FieldOrigin::Job, "Time between two runs of a periodic process, in seconds."),
        entry("start_check_begin_time", Int(SECONDS), Optional, FieldOrigin::Job, "Time between a start and the first check, in seconds."),
        entry("start_check_end_time", Int(SECONDS), Optional, FieldOrigin::Job, "Time between a start and the last check, in seconds."),
    ],
};

pub static HOST_GROUP: Section = Section {
    name: "HostGroup",
    about: "A named group of hosts, used as `hosts: [{group: NAME}]`.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&GROUP_META), Required, FieldOrigin::Abide, "Name of the group."),
        entry("hosts", List(&OneOf(&[Text, Shape::Section(&GROUP_HOST)])), Optional, FieldOrigin::Abide, "Hosts of the group. A host may be text: IP, or CLOUD:IP. Required without `from`."),
        entry("from", Shape::Section(&GROUP_FROM), Optional, FieldOrigin::Abide, "Hosts of the group from an inventory, instead of `hosts`. The control host's config file defines the inventory."),
        entry("vars", VARS, Optional, FieldOrigin::Abide, "Variables of the hosts of the group, used as ${NAME}. They win over those of Defaults."),
    ],
};

static GROUP_FROM: Section = Section {
    name: "from",
    about: "Hosts of an inventory, selected by their labels.",
    entries: &[
        entry("inventory", Text, Required, FieldOrigin::Abide, "Name of the inventory in `inventories` of the control host's config file."),
        entry("select", Text, Optional, FieldOrigin::Abide, "Label selector for the hosts of the inventory, such as set=eu,module in (api,worker). Unset: all hosts."),
    ],
};

static GROUP_META: Section = Section {
    name: "meta",
    about: "Name of the group or policy.",
    entries: &[entry("name", Name, Required, FieldOrigin::Abide, "Name of the group or policy.")],
};

pub static DEFAULTS: Section = Section {
    name: "Defaults",
    about: "Default fields for every Process in its directory and below. The nearest Defaults wins, field by field; maps merge, lists are replaced.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&OPTIONAL_META), Optional, FieldOrigin::Abide, "Name of the Defaults."),
        entry("spec", Shape::Section(&SPEC), Optional, FieldOrigin::Abide, "Default fields, as in the spec of a Process. Required without `vars`."),
        entry("vars", VARS, Optional, FieldOrigin::Abide, "Variables, used as ${NAME} in paths, commands, env, health and value_key. The nearest directory wins; a variable may use others."),
    ],
};

static OPTIONAL_META: Section = Section {
    name: "meta",
    about: "Name of the Defaults.",
    entries: &[entry("name", Text, Optional, FieldOrigin::Abide, "Name of the Defaults.")],
};

pub static POLICY: Section = Section {
    name: "Policy",
    about: "Rules for its directory and below. Every Policy above a file applies; the strictest wins.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&GROUP_META), Required, FieldOrigin::Abide, "Name of the policy."),
        entry("owner", Text, Optional, FieldOrigin::Abide, "Owner that the manifests are applied as."),
        entry("allow", Shape::Section(&ALLOW), Optional, FieldOrigin::Abide, "Patterns of allowed namespaces, users and hosts; `*` matches any text. Unset: everything is allowed."),
        entry("budgets", Shape::Section(&BUDGETS), Optional, FieldOrigin::Abide, "Maximum number of instances that one apply may disrupt."),
        entry("windows", List(&Shape::Section(&WINDOW)), Optional, FieldOrigin::Abide, "Time windows. Operations are held outside of them or, with `deny`, inside them."),
    ],
};

static ALLOW: Section = Section {
    name: "allow",
    about: "Patterns of allowed namespaces, users and hosts.",
    entries: &[
        entry("namespaces", List(&Text), Optional, FieldOrigin::Abide, "Allowed namespaces, such as web or web-*."),
        entry("users", List(&Text), Optional, FieldOrigin::Abide, "Allowed accounts. Requires identity.user to be set."),
        entry("hosts", List(&Text), Optional, FieldOrigin::Abide, "Allowed hosts, such as 0:10.0.*."),
    ],
};

static BUDGETS: Section = Section {
    name: "budgets",
    about: "Maximum number of instances that one apply may disrupt.",
    entries: &[
        entry("delete", Amount, Optional, FieldOrigin::Abide, "Maximum number or share of instances to delete."),
        entry("restart", Amount, Optional, FieldOrigin::Abide, "Maximum number or share of instances to restart."),
    ],
};

static WINDOW: Section = Section {
    name: "windows[]",
    about: "A weekly time window for operations.",
    entries: &[
        entry("days", Text, Optional, FieldOrigin::Abide, "Days of the week, such as mon-fri or sat,sun.").with_default("mon-sun"),
        entry("from", Text, Required, FieldOrigin::Abide, "Start time, as HH:MM."),
        entry("to", Text, Required, FieldOrigin::Abide, "End time, as HH:MM. A time before `from` is on the next day."),
        entry("tz", Text, Optional, FieldOrigin::Abide, "Time zone, such as Asia/Shanghai.").with_default("UTC"),
        entry("for", List(&Word(DISRUPTIONS)), Required, FieldOrigin::Abide, "Operations that are held outside of the window; with `deny`, inside it."),
        entry("deny", Bool, Optional, FieldOrigin::Abide, "Hold the operations inside the window. It overrides windows that allow them.").with_default("false"),
    ],
};

/// Request body of JOB, for `convert`.
pub static JOB_BODY: Section = Section {
    name: "JOB request",
    about: "A request body of manage_proc or operate_process.",
    entries: &[
        entry("bk_biz_id", Int(i64::MIN..=i64::MAX), Optional, FieldOrigin::Job, "Business id."),
        entry("bk_scope_type", Text, Optional, FieldOrigin::Job, "Scope type: biz or biz_set."),
        entry("bk_scope_id", LooseText, Optional, FieldOrigin::Job, "Id of the business or business set."),
        entry("op_type", Int(0..=9), Optional, FieldOrigin::Job, "Operation code."),
        entry("process_infos", List(&Shape::Section(&JOB_PROCESS)), Required, FieldOrigin::Job, "Processes of the request."),
        entry("bk_app_code", Text, Optional, FieldOrigin::Job, "Application code."),
        entry("bk_app_secret", Text, Optional, FieldOrigin::Job, "Application secret."),
        entry("bk_token", Text, Optional, FieldOrigin::Job, "User token."),
        entry("bk_username", Text, Optional, FieldOrigin::Job, "User name."),
    ],
};

static JOB_PROCESS: Section = Section {
    name: "process_infos[]",
    about: "One process of a JOB request.",
    entries: &[
        entry("proc_name", Text, Required, FieldOrigin::Job, "identity.proc_name"),
        entry("proc_owner", Text, Optional, FieldOrigin::Job, "job.proc_owner"),
        entry("contact", Text, Optional, FieldOrigin::Job, "job.proc_owner"),
        entry("setup_path", Text, Optional, FieldOrigin::Job, "identity.setup_path"),
        entry("pid_path", Text, Optional, FieldOrigin::Job, "identity.pid_path"),
        entry("cfg_path", Text, Optional, FieldOrigin::Job, "identity.config_path"),
        entry("log_path", Text, Optional, FieldOrigin::Job, "identity.log_path"),
        entry("account", Text, Optional, FieldOrigin::Job, "identity.user"),
        entry("start_cmd", Text, Optional, FieldOrigin::Job, "control.start_cmd"),
        entry("stop_cmd", Text, Optional, FieldOrigin::Job, "control.stop_cmd"),
        entry("restart_cmd", Text, Optional, FieldOrigin::Job, "control.restart_cmd"),
        entry("reload_cmd", Text, Optional, FieldOrigin::Job, "control.reload_cmd"),
        entry("kill_cmd", Text, Optional, FieldOrigin::Job, "control.kill_cmd"),
        entry("func_id", LooseText, Optional, FieldOrigin::Job, "job.func_id"),
        entry("instance_id", LooseText, Optional, FieldOrigin::Job, "job.instance_id"),
        entry("value_key", Text, Optional, FieldOrigin::Job, "identity.value_key"),
        entry("type", Int(AUTO_TYPE), Optional, FieldOrigin::Job, "monitor_policy.auto_type"),
        entry("cpu_lmt", Percent, Optional, FieldOrigin::Job, "resource.cpu"),
        entry("mem_lmt", Percent, Optional, FieldOrigin::Job, "resource.mem"),
        entry("cycle_time", Int(CYCLE_SECONDS), Optional, FieldOrigin::Job, "job.cycle_time"),
        entry("instance_num", Int(SMALL_COUNT), Optional, FieldOrigin::Job, "job.instance_num"),
        entry("op_timeout", Int(SECONDS), Optional, FieldOrigin::Job, "monitor_policy.op_timeout"),
        entry("start_check_begin_time", Int(SECONDS), Optional, FieldOrigin::Job, "job.start_check_begin_time"),
        entry("start_check_end_time", Int(SECONDS), Optional, FieldOrigin::Job, "job.start_check_end_time"),
        entry("ip_list", List(&Shape::Section(&JOB_HOST)), Required, FieldOrigin::Job, "hosts"),
    ],
};

static JOB_HOST: Section = Section {
    name: "ip_list[]",
    about: "A host of a JOB request.",
    entries: &[
        entry("bk_cloud_id", Int(ANY_COUNT), Required, FieldOrigin::Job, "Cloud area id."),
        entry("ip", Ip, Required, FieldOrigin::Job, "IP address."),
    ],
};


/// Sections with fields that have an alias.
pub static WITH_ALIASES: [&Section; 3] = [&SPEC, &IDENTITY, &MONITOR];
