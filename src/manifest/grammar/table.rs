//! The table itself, a line a field. Kept out of the formatter's hands: it is read down its columns.

use super::{API_VERSION, ANY_COUNT, AUTO_TYPE, CYCLE_SECONDS, EFFECTS, PROTECTIONS, INSTANCES, KINDS, DISRUPTIONS, RETRIES, SECONDS, SMALL_COUNT, START_MODES, STATES};
use super::{Entry, Requirement, Section, Shape, FieldOrigin};
use super::Requirement::{IgnoredInBody, Optional, Required, RequiredInBody};
use super::Shape::{AbsolutePath, Amount, Bool, Duration, Int, Ip, List, LooseText, Map, Name, OneOf, Percent, Text, Word};

const fn entry(name: &'static str, shape: Shape, need: Requirement, source: FieldOrigin, meaning: &'static str) -> Entry {
    Entry { name, aliases: &[], shape, need, default: None, meaning, source }
}

impl Entry {
    const fn with_default(mut self, default: &'static str) -> Entry {
        self.default = Some(default);
        self
    }

    const fn alias(mut self, aliases: &'static [&'static str]) -> Entry {
        self.aliases = aliases;
        self
    }
}

const KIND: Entry = entry("kind", Word(KINDS), Optional, FieldOrigin::Abide, "What the document declares.").with_default("Process");
const VERSION: Entry =
    entry("apiVersion", Word(&[API_VERSION]), Optional, FieldOrigin::Abide, "The version of this syntax.").with_default("abide/v1");

pub static PROCESS: Section = Section {
    name: "Process",
    about: "One process on one or many hosts. A request body {meta, hosts, spec} of GSE is one too.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&META), Required, FieldOrigin::Gse, "What the process is called."),
        entry("hosts", List(&Shape::Section(&HOST)), Required, FieldOrigin::GseAndJob, "Where it runs: hosts and groups of hosts, in any mix."),
        entry("state", Word(STATES), Optional, FieldOrigin::Abide, "What should be so: running (and guarded by the agent), stopped, unhosted (running, not guarded) or absent.").with_default("running"),
        entry("instances", Int(INSTANCES), Optional, FieldOrigin::Abide, "How many of it on each host; they are called NAME_1 to NAME_N, and ${instance} is the number."),
        entry("depends_on", List(&Text), Optional, FieldOrigin::Abide, "Processes that run before this one starts, as NAMESPACE/NAME, or NAME in the same namespace. Order only, never a restart."),
        entry("protect", List(&Word(PROTECTIONS)), Optional, FieldOrigin::Abide, "What Abide never does to it, whatever a plan says."),
        entry("adopt", Bool, Optional, FieldOrigin::Abide, "Take over a process that runs already and that nobody owns, without a restart.").with_default("false"),
        entry("moved_from", Text, Optional, FieldOrigin::Abide, "The name it had before, as NAMESPACE/NAME or NAME: a rename without a restart."),
        entry("on_change", Map(&Word(EFFECTS)), Optional, FieldOrigin::Abide, "What a change of a field does to this process, field path by field path, where it should not be what `explain FIELD` says."),
        entry("rollout", Shape::Section(&ROLLOUT), Optional, FieldOrigin::Abide, "How a change spreads over the hosts. Unset: all at once, within the budgets."),
        entry("spec", Shape::Section(&SPEC), Required, FieldOrigin::Gse, "What the process is and how it is kept."),
        entry("op_type", Int(0..=9), IgnoredInBody, FieldOrigin::GseOperate, "Part of a pasted request. `state` says what should be so."),
        entry("bk_app_code", Text, IgnoredInBody, FieldOrigin::GseAndJob, "Credential of a pasted request; it belongs in the target's configuration."),
        entry("bk_app_secret", Text, IgnoredInBody, FieldOrigin::GseAndJob, "Credential of a pasted request; it belongs in the target's configuration."),
        entry("bk_token", Text, IgnoredInBody, FieldOrigin::GseAndJob, "Credential of a pasted request; it belongs in the target's configuration."),
        entry("bk_username", Text, IgnoredInBody, FieldOrigin::GseAndJob, "Credential of a pasted request; it belongs in the target's configuration."),
    ],
};

static META: Section = Section {
    name: "meta",
    about: "What the process is called.",
    entries: &[
        entry("namespace", Name, Required, FieldOrigin::Gse, "A group of processes; with `name` it identifies the process. No `:`, `/` or space."),
        entry("name", Name, Required, FieldOrigin::Gse, "The user's name for the process, not the program's. No `:`, `/` or space."),
        entry("labels", Map(&LooseText), Optional, FieldOrigin::Gse, "Text by names of your choosing, to select by. Names that begin with abide_ are Abide's own."),
    ],
};

static HOST: Section = Section {
    name: "hosts[]",
    about: "A host by address or by agent, or a group of hosts.",
    entries: &[
        entry("ip", Text, Optional, FieldOrigin::GseAndJob, "IPv4 or IPv6 address; with bk_cloud_id it identifies the host."),
        entry("bk_cloud_id", Int(ANY_COUNT), Optional, FieldOrigin::GseAndJob, "The cloud area that the address is in. Required beside `ip`."),
        entry("bk_supplier_id", Int(ANY_COUNT), Optional, FieldOrigin::GseRegister, "The supplier's id, for GSE 1.0."),
        entry("bk_agent_id", Text, Optional, FieldOrigin::Abide, "The id of the host's GSE 2.0 agent; instead of an address, or beside it."),
        entry("group", Text, Optional, FieldOrigin::Abide, "All hosts of a HostGroup."),
        entry("labels", Text, Optional, FieldOrigin::Abide, "With `group`: only its hosts with these labels, such as rack=a,tier in (x,y),!old."),
    ],
};

static GROUP_HOST: Section = Section {
    name: "hosts[]",
    about: "A host of the group, by address or by agent.",
    entries: &[
        entry("ip", Text, Optional, FieldOrigin::GseAndJob, "IPv4 or IPv6 address; with bk_cloud_id it identifies the host."),
        entry("bk_cloud_id", Int(ANY_COUNT), Optional, FieldOrigin::GseAndJob, "The cloud area that the address is in. Required beside `ip`."),
        entry("bk_supplier_id", Int(ANY_COUNT), Optional, FieldOrigin::GseRegister, "The supplier's id, for GSE 1.0."),
        entry("bk_agent_id", Text, Optional, FieldOrigin::Abide, "The id of the host's GSE 2.0 agent; instead of an address, or beside it."),
        entry("labels", Map(&LooseText), Optional, FieldOrigin::Abide, "Labels of the host, to choose by in a Process."),
    ],
};

static ROLLOUT: Section = Section {
    name: "rollout",
    about: "How a change spreads over the hosts.",
    entries: &[
        entry("batch", Amount, Optional, FieldOrigin::Abide, "How many instances change at a time."),
        entry("canary", Amount, Optional, FieldOrigin::Abide, "How many change first, alone."),
        entry("soak", Duration, Optional, FieldOrigin::Abide, "How long a batch must stay healthy before the next."),
        entry("max_failures", Int(ANY_COUNT), Optional, FieldOrigin::Abide, "How many may fail before the rollout stops."),
        entry("auto_rollback", Bool, Optional, FieldOrigin::Abide, "Go back to the last healthy spec when it stops.").with_default("false"),
    ],
};

static SPEC: Section = Section {
    name: "spec",
    about: "What the process is and how it is kept.",
    entries: &[
        entry("identity", Shape::Section(&IDENTITY), Required, FieldOrigin::Gse, "How the agent recognises the process."),
        entry("control", Shape::Section(&CONTROL), Optional, FieldOrigin::Gse, "The commands that act on it."),
        entry("resource", Shape::Section(&RESOURCE), Optional, FieldOrigin::GseRegister, "Limits. Unset is no limit: none is ever invented."),
        entry("monitor_policy", Shape::Section(&MONITOR), Optional, FieldOrigin::Gse, "How the agent keeps it.").alias(&["alive_monitor_policy"]),
        entry("warn_report_policy", Shape::Section(&WARN), Optional, FieldOrigin::Gse, "Where alarms go."),
        entry("configmap", List(&Shape::Section(&CONFIG)), Optional, FieldOrigin::Gse, "Files that the process reads, and what they should contain. Abide copies no files."),
        entry("env", Map(&OneOf(&[LooseText, Shape::Section(&ENV)])), Optional, FieldOrigin::Abide, "Environment of the process: text, {file: PATH} read by the agent at each start, or {value: TEXT, secret: true}. Variables such as ${host.ip} are replaced."),
        entry("job", Shape::Section(&JOB), Optional, FieldOrigin::Job, "What only JOB's calls know."),
    ],
};

static IDENTITY: Section = Section {
    name: "identity",
    about: "How the agent recognises the process.",
    entries: &[
        entry("proc_name", Text, Required, FieldOrigin::GseAndJob, "The name of the executable, as /proc/PID/exe shows it."),
        entry("setup_path", AbsolutePath, Required, FieldOrigin::GseAndJob, "Working directory of every command. Abide never creates it."),
        entry("pid_path", AbsolutePath, Required, FieldOrigin::GseAndJob, "The file that holds the pid. The user needs write access to its directory."),
        entry("config_path", AbsolutePath, Optional, FieldOrigin::GseAndJob, "The process's configuration file (JOB: cfg_path)."),
        entry("log_path", AbsolutePath, Optional, FieldOrigin::GseAndJob, "Where its log is; in foreground mode its output goes there. The user needs write access to it."),
        entry("user", Text, RequiredInBody, FieldOrigin::GseAndJob, "The account it runs as (JOB: account). Left out: the agent's own user, on the local target only."),
        entry("value_key", Text, Optional, FieldOrigin::GseAndJob, "What tells this process from others of the host. Needed where two share setup_path and proc_name.").alias(&["index_key"]).with_default("setup_path + proc_name"),
    ],
};

static CONTROL: Section = Section {
    name: "control",
    about: "The commands that act on the process: run by the shell, in setup_path, as user.",
    entries: &[
        entry("start_cmd", Text, Optional, FieldOrigin::GseAndJob, "Starts it. Required where the state needs a start."),
        entry("stop_cmd", Text, Optional, FieldOrigin::GseAndJob, "Stops it. Unset, Abide's agent signals the process itself."),
        entry("restart_cmd", Text, Optional, FieldOrigin::GseAndJob, "Restarts it. Unset: stop, then start."),
        entry("reload_cmd", Text, Optional, FieldOrigin::GseAndJob, "Makes it read its configuration again, under the same pid. Unset: such changes restart it."),
        entry("kill_cmd", Text, Optional, FieldOrigin::GseAndJob, "Ends it by force."),
        entry("version_cmd", Text, Optional, FieldOrigin::Gse, "Prints its version."),
        entry("health_cmd", Text, Optional, FieldOrigin::Gse, "Exits with 0 while it is healthy."),
        entry("start_mode", Word(START_MODES), Optional, FieldOrigin::Abide, "daemon: start_cmd leaves a process behind that writes its pid file; foreground: start_cmd is the process.").with_default("daemon"),
    ],
};

static RESOURCE: Section = Section {
    name: "resource",
    about: "Limits of the process. Over cpu or mem, the agent stops it.",
    entries: &[
        entry("cpu", Percent, Optional, FieldOrigin::GseAndJob, "Most cpu, in percent of the whole host (JOB: cpu_lmt)."),
        entry("mem", Percent, Optional, FieldOrigin::GseAndJob, "Most memory, in percent of the whole host (JOB: mem_lmt)."),
        entry("fd", Int(ANY_COUNT), Optional, FieldOrigin::GseRegister, "Most open files. Reserved by GSE."),
        entry("disk", Int(ANY_COUNT), Optional, FieldOrigin::GseRegister, "Most disk space. Reserved by GSE."),
        entry("net", Int(ANY_COUNT), Optional, FieldOrigin::GseRegister, "Most network traffic. Reserved by GSE."),
    ],
};

static MONITOR: Section = Section {
    name: "monitor_policy",
    about: "How the agent keeps the process.",
    entries: &[
        entry("auto_type", Int(AUTO_TYPE), RequiredInBody, FieldOrigin::GseAndJob, "0 periodic (runs by crontab_rule or job.cycle_time), 1 resident (kept running), 2 one-shot (runs once; JOB: type).").with_default("1"),
        entry("start_check_secs", Int(SECONDS), Optional, FieldOrigin::Gse, "How long after the start the process is checked, in seconds.").with_default("5"),
        entry("stop_check_secs", Int(SECONDS), Optional, FieldOrigin::Gse, "How long a stop may take, in seconds."),
        entry("start_retries", Int(RETRIES), Optional, FieldOrigin::Gse, "How often a dead process is started again before it counts as failed.").with_default("4"),
        entry("start_interval", Int(SECONDS), Optional, FieldOrigin::Gse, "Seconds between two such starts.").with_default("10"),
        entry("crontab_rule", Text, Optional, FieldOrigin::Gse, "When a periodic process runs: minute hour day month weekday.").alias(&["crotab_rule"]),
        entry("op_timeout", Int(SECONDS), Optional, FieldOrigin::GseOperate, "How long a command may run, in seconds.").with_default("60"),
    ],
};

static WARN: Section = Section {
    name: "warn_report_policy",
    about: "Where alarms go.",
    entries: &[entry("report_id", Int(i64::MIN..=i64::MAX), Optional, FieldOrigin::Gse, "The id alarms are reported under.")],
};

static CONFIG: Section = Section {
    name: "configmap[]",
    about: "A file that the process reads.",
    entries: &[
        entry("path", AbsolutePath, Optional, FieldOrigin::Gse, "The file."),
        entry("md5", Text, Optional, FieldOrigin::Gse, "The md5 of its content, 32 hex digits."),
    ],
};

static ENV: Section = Section {
    name: "env value",
    about: "Where a value comes from, or that it is secret.",
    entries: &[
        entry("file", AbsolutePath, Optional, FieldOrigin::Abide, "Read by the agent at each start; the value is in no plan, store or log."),
        entry("value", LooseText, Optional, FieldOrigin::Abide, "The value itself."),
        entry("secret", Bool, Optional, FieldOrigin::Abide, "Show a digest instead of the value.").with_default("false"),
    ],
};

static JOB: Section = Section {
    name: "job",
    about: "What only JOB's calls know.",
    entries: &[
        entry("proc_owner", Text, Optional, FieldOrigin::Job, "The person responsible (operate_process: contact)."),
        entry("func_id", Text, Optional, FieldOrigin::Job, "Function id, as CMDB defines it."),
        entry("instance_id", Text, Optional, FieldOrigin::Job, "Instance id, as CMDB defines it."),
        entry("instance_num", Int(SMALL_COUNT), Optional, FieldOrigin::Job, "Number of instances."),
        entry("cycle_time", Int(CYCLE_SECONDS), Optional, FieldOrigin::Job, "Seconds between two runs of a periodic process."),
        entry("start_check_begin_time", Int(SECONDS), Optional, FieldOrigin::Job, "Seconds after a start at which checking begins."),
        entry("start_check_end_time", Int(SECONDS), Optional, FieldOrigin::Job, "Seconds after a start at which checking ends."),
    ],
};

pub static HOST_GROUP: Section = Section {
    name: "HostGroup",
    about: "Hosts under one name, for `hosts: [{group: NAME}]`.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&GROUP_META), Required, FieldOrigin::Abide, "What the group is called."),
        entry("hosts", List(&Shape::Section(&GROUP_HOST)), Required, FieldOrigin::Abide, "The hosts."),
    ],
};

static GROUP_META: Section = Section {
    name: "meta",
    about: "What it is called.",
    entries: &[entry("name", Name, Required, FieldOrigin::Abide, "Its name.")],
};

pub static DEFAULTS: Section = Section {
    name: "Defaults",
    about: "Fields for every Process of its directory and below; the nearest wins, field by field. Maps merge, lists are replaced.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&OPTIONAL_META), Optional, FieldOrigin::Abide, "What it is called."),
        entry("spec", Shape::Section(&SPEC), Required, FieldOrigin::Abide, "The fields, as in a Process."),
    ],
};

static OPTIONAL_META: Section = Section {
    name: "meta",
    about: "What it is called.",
    entries: &[entry("name", Text, Optional, FieldOrigin::Abide, "Its name.")],
};

pub static POLICY: Section = Section {
    name: "Policy",
    about: "Rules for its directory and below. Every Policy above a file applies, the strictest wins.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&GROUP_META), Required, FieldOrigin::Abide, "What the policy is called."),
        entry("owner", Text, Optional, FieldOrigin::Abide, "The owner that these manifests are applied as."),
        entry("allow", Shape::Section(&ALLOW), Optional, FieldOrigin::Abide, "What may be declared. Unset allows everything; `*` stands for any text."),
        entry("budgets", Shape::Section(&BUDGETS), Optional, FieldOrigin::Abide, "How much one apply may disturb."),
        entry("windows", List(&Shape::Section(&WINDOW)), Optional, FieldOrigin::Abide, "When some operations may happen."),
    ],
};

static ALLOW: Section = Section {
    name: "allow",
    about: "What may be declared.",
    entries: &[
        entry("namespaces", List(&Text), Optional, FieldOrigin::Abide, "Namespaces, such as web or web-*."),
        entry("users", List(&Text), Optional, FieldOrigin::Abide, "Accounts that processes may run as."),
        entry("hosts", List(&Text), Optional, FieldOrigin::Abide, "Hosts, such as 0:10.0.*."),
    ],
};

static BUDGETS: Section = Section {
    name: "budgets",
    about: "How much one apply may disturb.",
    entries: &[
        entry("delete", Amount, Optional, FieldOrigin::Abide, "Most instances deleted."),
        entry("restart", Amount, Optional, FieldOrigin::Abide, "Most instances restarted."),
    ],
};

static WINDOW: Section = Section {
    name: "windows[]",
    about: "A time of the week in which some operations may happen.",
    entries: &[
        entry("days", Text, Optional, FieldOrigin::Abide, "Days such as mon-fri, or sat,sun.").with_default("mon-sun"),
        entry("from", Text, Required, FieldOrigin::Abide, "Beginning, as HH:MM."),
        entry("to", Text, Required, FieldOrigin::Abide, "End, as HH:MM; before `from`: on the next day."),
        entry("tz", Text, Optional, FieldOrigin::Abide, "Time zone, such as Asia/Shanghai.").with_default("UTC"),
        entry("for", List(&Word(DISRUPTIONS)), Required, FieldOrigin::Abide, "The operations that are held outside of it."),
    ],
};

/// A request body of JOB, for `convert`.
pub static JOB_BODY: Section = Section {
    name: "JOB request",
    about: "A body of manage_proc or operate_process.",
    entries: &[
        entry("bk_biz_id", Int(i64::MIN..=i64::MAX), Optional, FieldOrigin::Job, "Business id."),
        entry("bk_scope_type", Text, Optional, FieldOrigin::Job, "biz or biz_set."),
        entry("bk_scope_id", LooseText, Optional, FieldOrigin::Job, "Id of the business or set."),
        entry("op_type", Int(0..=9), Optional, FieldOrigin::Job, "The operation."),
        entry("process_infos", List(&Shape::Section(&JOB_PROCESS)), Required, FieldOrigin::Job, "The processes."),
        entry("bk_app_code", Text, Optional, FieldOrigin::Job, "Credential."),
        entry("bk_app_secret", Text, Optional, FieldOrigin::Job, "Credential."),
        entry("bk_token", Text, Optional, FieldOrigin::Job, "Credential."),
        entry("bk_username", Text, Optional, FieldOrigin::Job, "Credential."),
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


/// The sections in which a field has a second spelling.
pub static WITH_ALIASES: [&Section; 3] = [&SPEC, &IDENTITY, &MONITOR];
