//! The table itself, a line a field. Kept out of the formatter's hands: it is read down its columns.

use super::{API_VERSION, ANY_COUNT, AUTO_TYPE, CYCLE_SECONDS, EFFECTS, GUARDS, INSTANCES, KINDS, OPERATIONS, RETRIES, SECONDS, SMALL_COUNT, START_MODES, STATES};
use super::{Entry, Need, Section, Shape, Source};
use super::Need::{IgnoredInBody, Optional, Required, RequiredInBody};
use super::Shape::{AbsolutePath, Amount, Bool, Duration, Int, Ip, List, LooseText, Map, Name, OneOf, Percent, Text, Word};

const fn entry(name: &'static str, shape: Shape, need: Need, source: Source, meaning: &'static str) -> Entry {
    Entry { name, aliases: &[], shape, need, default: None, meaning, source }
}

impl Entry {
    const fn or(mut self, default: &'static str) -> Entry {
        self.default = Some(default);
        self
    }

    const fn alias(mut self, aliases: &'static [&'static str]) -> Entry {
        self.aliases = aliases;
        self
    }
}

const KIND: Entry = entry("kind", Word(KINDS), Optional, Source::Abide, "What the document declares.").or("Process");
const VERSION: Entry =
    entry("apiVersion", Word(&[API_VERSION]), Optional, Source::Abide, "The version of this syntax.").or("abide/v1");

pub static PROCESS: Section = Section {
    name: "Process",
    about: "One process on one or many hosts. A request body {meta, hosts, spec} of GSE is one too.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&META), Required, Source::Gse, "What the process is called."),
        entry("hosts", List(&Shape::Section(&HOST)), Required, Source::GseAndJob, "Where it runs: hosts and groups of hosts, in any mix."),
        entry("state", Word(STATES), Optional, Source::Abide, "What should be so: running (and guarded by the agent), stopped, unhosted (running, not guarded) or absent.").or("running"),
        entry("instances", Int(INSTANCES), Optional, Source::Abide, "How many of it on each host; they are called NAME_1 to NAME_N, and ${instance} is the number."),
        entry("depends_on", List(&Text), Optional, Source::Abide, "Processes that run before this one starts, as NAMESPACE/NAME, or NAME in the same namespace. Order only, never a restart."),
        entry("protect", List(&Word(GUARDS)), Optional, Source::Abide, "What Abide never does to it, whatever a plan says."),
        entry("adopt", Bool, Optional, Source::Abide, "Take over a process that runs already and that nobody owns, without a restart.").or("false"),
        entry("moved_from", Text, Optional, Source::Abide, "The name it had before, as NAMESPACE/NAME or NAME: a rename without a restart."),
        entry("on_change", Map(&Word(EFFECTS)), Optional, Source::Abide, "What a change of a field does to this process, field path by field path, where it should not be what `explain FIELD` says."),
        entry("rollout", Shape::Section(&ROLLOUT), Optional, Source::Abide, "How a change spreads over the hosts. Unset: all at once, within the budgets."),
        entry("spec", Shape::Section(&SPEC), Required, Source::Gse, "What the process is and how it is kept."),
        entry("op_type", Int(0..=9), IgnoredInBody, Source::GseOperate, "Part of a pasted request. `state` says what should be so."),
        entry("bk_app_code", Text, IgnoredInBody, Source::GseAndJob, "Credential of a pasted request; it belongs in the target's configuration."),
        entry("bk_app_secret", Text, IgnoredInBody, Source::GseAndJob, "Credential of a pasted request; it belongs in the target's configuration."),
        entry("bk_token", Text, IgnoredInBody, Source::GseAndJob, "Credential of a pasted request; it belongs in the target's configuration."),
        entry("bk_username", Text, IgnoredInBody, Source::GseAndJob, "Credential of a pasted request; it belongs in the target's configuration."),
    ],
};

static META: Section = Section {
    name: "meta",
    about: "What the process is called.",
    entries: &[
        entry("namespace", Name, Required, Source::Gse, "A group of processes; with `name` it identifies the process. No `:`, `/` or space."),
        entry("name", Name, Required, Source::Gse, "The user's name for the process, not the program's. No `:`, `/` or space."),
        entry("labels", Map(&LooseText), Optional, Source::Gse, "Text by names of your choosing, to select by. Names that begin with abide_ are Abide's own."),
    ],
};

static HOST: Section = Section {
    name: "hosts[]",
    about: "A host by address or by agent, or a group of hosts.",
    entries: &[
        entry("ip", Text, Optional, Source::GseAndJob, "IPv4 or IPv6 address; with bk_cloud_id it identifies the host."),
        entry("bk_cloud_id", Int(ANY_COUNT), Optional, Source::GseAndJob, "The cloud area that the address is in. Required beside `ip`."),
        entry("bk_supplier_id", Int(ANY_COUNT), Optional, Source::GseRegister, "The supplier's id, for GSE 1.0."),
        entry("bk_agent_id", Text, Optional, Source::Abide, "The id of the host's GSE 2.0 agent; instead of an address, or beside it."),
        entry("group", Text, Optional, Source::Abide, "All hosts of a HostGroup."),
        entry("labels", Text, Optional, Source::Abide, "With `group`: only its hosts with these labels, such as rack=a,tier in (x,y),!old."),
    ],
};

static GROUP_HOST: Section = Section {
    name: "hosts[]",
    about: "A host of the group, by address or by agent.",
    entries: &[
        entry("ip", Text, Optional, Source::GseAndJob, "IPv4 or IPv6 address; with bk_cloud_id it identifies the host."),
        entry("bk_cloud_id", Int(ANY_COUNT), Optional, Source::GseAndJob, "The cloud area that the address is in. Required beside `ip`."),
        entry("bk_supplier_id", Int(ANY_COUNT), Optional, Source::GseRegister, "The supplier's id, for GSE 1.0."),
        entry("bk_agent_id", Text, Optional, Source::Abide, "The id of the host's GSE 2.0 agent; instead of an address, or beside it."),
        entry("labels", Map(&LooseText), Optional, Source::Abide, "Labels of the host, to choose by in a Process."),
    ],
};

static ROLLOUT: Section = Section {
    name: "rollout",
    about: "How a change spreads over the hosts.",
    entries: &[
        entry("batch", Amount, Optional, Source::Abide, "How many instances change at a time."),
        entry("canary", Amount, Optional, Source::Abide, "How many change first, alone."),
        entry("soak", Duration, Optional, Source::Abide, "How long a batch must stay healthy before the next."),
        entry("max_failures", Int(ANY_COUNT), Optional, Source::Abide, "How many may fail before the rollout stops."),
        entry("auto_rollback", Bool, Optional, Source::Abide, "Go back to the last healthy spec when it stops.").or("false"),
    ],
};

static SPEC: Section = Section {
    name: "spec",
    about: "What the process is and how it is kept.",
    entries: &[
        entry("identity", Shape::Section(&IDENTITY), Required, Source::Gse, "How the agent recognises the process."),
        entry("control", Shape::Section(&CONTROL), Optional, Source::Gse, "The commands that act on it."),
        entry("resource", Shape::Section(&RESOURCE), Optional, Source::GseRegister, "Limits. Unset is no limit: none is ever invented."),
        entry("monitor_policy", Shape::Section(&MONITOR), Optional, Source::Gse, "How the agent keeps it.").alias(&["alive_monitor_policy"]),
        entry("warn_report_policy", Shape::Section(&WARN), Optional, Source::Gse, "Where alarms go."),
        entry("configmap", List(&Shape::Section(&CONFIG)), Optional, Source::Gse, "Files that the process reads, and what they should contain. Abide copies no files."),
        entry("env", Map(&OneOf(&[LooseText, Shape::Section(&ENV)])), Optional, Source::Abide, "Environment of the process: text, {file: PATH} read by the agent at each start, or {value: TEXT, secret: true}. Variables such as ${host.ip} are replaced."),
        entry("job", Shape::Section(&JOB), Optional, Source::Job, "What only JOB's calls know."),
    ],
};

static IDENTITY: Section = Section {
    name: "identity",
    about: "How the agent recognises the process.",
    entries: &[
        entry("proc_name", Text, Required, Source::GseAndJob, "The name of the executable, as /proc/PID/exe shows it."),
        entry("setup_path", AbsolutePath, Required, Source::GseAndJob, "Working directory of every command. Abide never creates it."),
        entry("pid_path", AbsolutePath, Required, Source::GseAndJob, "The file that holds the pid. The user needs write access to its directory."),
        entry("config_path", AbsolutePath, Optional, Source::GseAndJob, "The process's configuration file (JOB: cfg_path)."),
        entry("log_path", AbsolutePath, Optional, Source::GseAndJob, "Where its log is; in foreground mode its output goes there. The user needs write access to it."),
        entry("user", Text, RequiredInBody, Source::GseAndJob, "The account it runs as (JOB: account). Left out: the agent's own user, on the local target only."),
        entry("value_key", Text, Optional, Source::GseAndJob, "What tells this process from others of the host. Needed where two share setup_path and proc_name.").alias(&["index_key"]).or("setup_path + proc_name"),
    ],
};

static CONTROL: Section = Section {
    name: "control",
    about: "The commands that act on the process: run by the shell, in setup_path, as user.",
    entries: &[
        entry("start_cmd", Text, Optional, Source::GseAndJob, "Starts it. Required where the state needs a start."),
        entry("stop_cmd", Text, Optional, Source::GseAndJob, "Stops it. Unset, Abide's agent signals the process itself."),
        entry("restart_cmd", Text, Optional, Source::GseAndJob, "Restarts it. Unset: stop, then start."),
        entry("reload_cmd", Text, Optional, Source::GseAndJob, "Makes it read its configuration again, under the same pid. Unset: such changes restart it."),
        entry("kill_cmd", Text, Optional, Source::GseAndJob, "Ends it by force."),
        entry("version_cmd", Text, Optional, Source::Gse, "Prints its version."),
        entry("health_cmd", Text, Optional, Source::Gse, "Exits with 0 while it is healthy."),
        entry("start_mode", Word(START_MODES), Optional, Source::Abide, "daemon: start_cmd leaves a process behind that writes its pid file; foreground: start_cmd is the process.").or("daemon"),
    ],
};

static RESOURCE: Section = Section {
    name: "resource",
    about: "Limits of the process. Over cpu or mem, the agent stops it.",
    entries: &[
        entry("cpu", Percent, Optional, Source::GseAndJob, "Most cpu, in percent of the whole host (JOB: cpu_lmt)."),
        entry("mem", Percent, Optional, Source::GseAndJob, "Most memory, in percent of the whole host (JOB: mem_lmt)."),
        entry("fd", Int(ANY_COUNT), Optional, Source::GseRegister, "Most open files. Reserved by GSE."),
        entry("disk", Int(ANY_COUNT), Optional, Source::GseRegister, "Most disk space. Reserved by GSE."),
        entry("net", Int(ANY_COUNT), Optional, Source::GseRegister, "Most network traffic. Reserved by GSE."),
    ],
};

static MONITOR: Section = Section {
    name: "monitor_policy",
    about: "How the agent keeps the process.",
    entries: &[
        entry("auto_type", Int(AUTO_TYPE), RequiredInBody, Source::GseAndJob, "0 periodic (runs by crontab_rule or job.cycle_time), 1 resident (kept running), 2 one-shot (runs once; JOB: type).").or("1"),
        entry("start_check_secs", Int(SECONDS), Optional, Source::Gse, "How long after the start the process is checked, in seconds.").or("5"),
        entry("stop_check_secs", Int(SECONDS), Optional, Source::Gse, "How long a stop may take, in seconds."),
        entry("start_retries", Int(RETRIES), Optional, Source::Gse, "How often a dead process is started again before it counts as failed.").or("4"),
        entry("start_interval", Int(SECONDS), Optional, Source::Gse, "Seconds between two such starts.").or("10"),
        entry("crontab_rule", Text, Optional, Source::Gse, "When a periodic process runs: minute hour day month weekday.").alias(&["crotab_rule"]),
        entry("op_timeout", Int(SECONDS), Optional, Source::GseOperate, "How long a command may run, in seconds.").or("60"),
    ],
};

static WARN: Section = Section {
    name: "warn_report_policy",
    about: "Where alarms go.",
    entries: &[entry("report_id", Int(i64::MIN..=i64::MAX), Optional, Source::Gse, "The id alarms are reported under.")],
};

static CONFIG: Section = Section {
    name: "configmap[]",
    about: "A file that the process reads.",
    entries: &[
        entry("path", AbsolutePath, Optional, Source::Gse, "The file."),
        entry("md5", Text, Optional, Source::Gse, "The md5 of its content, 32 hex digits."),
    ],
};

static ENV: Section = Section {
    name: "env value",
    about: "Where a value comes from, or that it is secret.",
    entries: &[
        entry("file", AbsolutePath, Optional, Source::Abide, "Read by the agent at each start; the value is in no plan, store or log."),
        entry("value", LooseText, Optional, Source::Abide, "The value itself."),
        entry("secret", Bool, Optional, Source::Abide, "Show a digest instead of the value.").or("false"),
    ],
};

static JOB: Section = Section {
    name: "job",
    about: "What only JOB's calls know.",
    entries: &[
        entry("proc_owner", Text, Optional, Source::Job, "The person responsible (operate_process: contact)."),
        entry("func_id", Text, Optional, Source::Job, "Function id, as CMDB defines it."),
        entry("instance_id", Text, Optional, Source::Job, "Instance id, as CMDB defines it."),
        entry("instance_num", Int(SMALL_COUNT), Optional, Source::Job, "Number of instances."),
        entry("cycle_time", Int(CYCLE_SECONDS), Optional, Source::Job, "Seconds between two runs of a periodic process."),
        entry("start_check_begin_time", Int(SECONDS), Optional, Source::Job, "Seconds after a start at which checking begins."),
        entry("start_check_end_time", Int(SECONDS), Optional, Source::Job, "Seconds after a start at which checking ends."),
    ],
};

pub static HOST_GROUP: Section = Section {
    name: "HostGroup",
    about: "Hosts under one name, for `hosts: [{group: NAME}]`.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&GROUP_META), Required, Source::Abide, "What the group is called."),
        entry("hosts", List(&Shape::Section(&GROUP_HOST)), Required, Source::Abide, "The hosts."),
    ],
};

static GROUP_META: Section = Section {
    name: "meta",
    about: "What it is called.",
    entries: &[entry("name", Name, Required, Source::Abide, "Its name.")],
};

pub static DEFAULTS: Section = Section {
    name: "Defaults",
    about: "Fields for every Process of its directory and below; the nearest wins, field by field. Maps merge, lists are replaced.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&OPTIONAL_META), Optional, Source::Abide, "What it is called."),
        entry("spec", Shape::Section(&SPEC), Required, Source::Abide, "The fields, as in a Process."),
    ],
};

static OPTIONAL_META: Section = Section {
    name: "meta",
    about: "What it is called.",
    entries: &[entry("name", Text, Optional, Source::Abide, "Its name.")],
};

pub static POLICY: Section = Section {
    name: "Policy",
    about: "Rules for its directory and below. Every Policy above a file applies, the strictest wins.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&GROUP_META), Required, Source::Abide, "What the policy is called."),
        entry("owner", Text, Optional, Source::Abide, "The owner that these manifests are applied as."),
        entry("allow", Shape::Section(&ALLOW), Optional, Source::Abide, "What may be declared. Unset allows everything; `*` stands for any text."),
        entry("budgets", Shape::Section(&BUDGETS), Optional, Source::Abide, "How much one apply may disturb."),
        entry("windows", List(&Shape::Section(&WINDOW)), Optional, Source::Abide, "When some operations may happen."),
    ],
};

static ALLOW: Section = Section {
    name: "allow",
    about: "What may be declared.",
    entries: &[
        entry("namespaces", List(&Text), Optional, Source::Abide, "Namespaces, such as web or web-*."),
        entry("users", List(&Text), Optional, Source::Abide, "Accounts that processes may run as."),
        entry("hosts", List(&Text), Optional, Source::Abide, "Hosts, such as 0:10.0.*."),
    ],
};

static BUDGETS: Section = Section {
    name: "budgets",
    about: "How much one apply may disturb.",
    entries: &[
        entry("delete", Amount, Optional, Source::Abide, "Most instances deleted."),
        entry("restart", Amount, Optional, Source::Abide, "Most instances restarted."),
    ],
};

static WINDOW: Section = Section {
    name: "windows[]",
    about: "A time of the week in which some operations may happen.",
    entries: &[
        entry("days", Text, Optional, Source::Abide, "Days such as mon-fri, or sat,sun.").or("mon-sun"),
        entry("from", Text, Required, Source::Abide, "Beginning, as HH:MM."),
        entry("to", Text, Required, Source::Abide, "End, as HH:MM; before `from`: on the next day."),
        entry("tz", Text, Optional, Source::Abide, "Time zone, such as Asia/Shanghai.").or("UTC"),
        entry("for", List(&Word(OPERATIONS)), Required, Source::Abide, "The operations that are held outside of it."),
    ],
};

/// A request body of JOB, for `convert`.
pub static JOB_BODY: Section = Section {
    name: "JOB request",
    about: "A body of manage_proc or operate_process.",
    entries: &[
        entry("bk_biz_id", Int(i64::MIN..=i64::MAX), Optional, Source::Job, "Business id."),
        entry("bk_scope_type", Text, Optional, Source::Job, "biz or biz_set."),
        entry("bk_scope_id", LooseText, Optional, Source::Job, "Id of the business or set."),
        entry("op_type", Int(0..=9), Optional, Source::Job, "The operation."),
        entry("process_infos", List(&Shape::Section(&JOB_PROCESS)), Required, Source::Job, "The processes."),
        entry("bk_app_code", Text, Optional, Source::Job, "Credential."),
        entry("bk_app_secret", Text, Optional, Source::Job, "Credential."),
        entry("bk_token", Text, Optional, Source::Job, "Credential."),
        entry("bk_username", Text, Optional, Source::Job, "Credential."),
    ],
};

static JOB_PROCESS: Section = Section {
    name: "process_infos[]",
    about: "One process of a JOB request.",
    entries: &[
        entry("proc_name", Text, Required, Source::Job, "identity.proc_name"),
        entry("proc_owner", Text, Optional, Source::Job, "job.proc_owner"),
        entry("contact", Text, Optional, Source::Job, "job.proc_owner"),
        entry("setup_path", Text, Optional, Source::Job, "identity.setup_path"),
        entry("pid_path", Text, Optional, Source::Job, "identity.pid_path"),
        entry("cfg_path", Text, Optional, Source::Job, "identity.config_path"),
        entry("log_path", Text, Optional, Source::Job, "identity.log_path"),
        entry("account", Text, Optional, Source::Job, "identity.user"),
        entry("start_cmd", Text, Optional, Source::Job, "control.start_cmd"),
        entry("stop_cmd", Text, Optional, Source::Job, "control.stop_cmd"),
        entry("restart_cmd", Text, Optional, Source::Job, "control.restart_cmd"),
        entry("reload_cmd", Text, Optional, Source::Job, "control.reload_cmd"),
        entry("kill_cmd", Text, Optional, Source::Job, "control.kill_cmd"),
        entry("func_id", LooseText, Optional, Source::Job, "job.func_id"),
        entry("instance_id", LooseText, Optional, Source::Job, "job.instance_id"),
        entry("value_key", Text, Optional, Source::Job, "identity.value_key"),
        entry("type", Int(AUTO_TYPE), Optional, Source::Job, "monitor_policy.auto_type"),
        entry("cpu_lmt", Percent, Optional, Source::Job, "resource.cpu"),
        entry("mem_lmt", Percent, Optional, Source::Job, "resource.mem"),
        entry("cycle_time", Int(CYCLE_SECONDS), Optional, Source::Job, "job.cycle_time"),
        entry("instance_num", Int(SMALL_COUNT), Optional, Source::Job, "job.instance_num"),
        entry("op_timeout", Int(SECONDS), Optional, Source::Job, "monitor_policy.op_timeout"),
        entry("start_check_begin_time", Int(SECONDS), Optional, Source::Job, "job.start_check_begin_time"),
        entry("start_check_end_time", Int(SECONDS), Optional, Source::Job, "job.start_check_end_time"),
        entry("ip_list", List(&Shape::Section(&JOB_HOST)), Required, Source::Job, "hosts"),
    ],
};

static JOB_HOST: Section = Section {
    name: "ip_list[]",
    about: "A host of a JOB request.",
    entries: &[
        entry("bk_cloud_id", Int(ANY_COUNT), Required, Source::Job, "Cloud area id."),
        entry("ip", Ip, Required, Source::Job, "IP address."),
    ],
};


/// The sections in which a field has a second spelling.
pub static WITH_ALIASES: [&Section; 3] = [&SPEC, &IDENTITY, &MONITOR];
