//! Document structs for serde: manifests as written, before any check.
//!
//! Rare sections are boxed: a file may have 100,000 documents. One struct has the optional fields of every kind, so that serde parses in one pass without buffering. `check` reports
//! missing fields, fields of another kind and values out of range. An input that serde rejects (unknown field, wrong
//! type, duplicate key) goes to `structure`, which finds and locates all such problems of the document.

mod merge;
mod values;

use serde::{Deserialize, Serialize};

pub use merge::Overlay;
pub use values::{
    BaseValue, EnvEntry, HealthValue, HookValue, HostLabels, HostValue, Map, PatchFields, ProtectValue, Real,
    RestartValue, Scalar, Text, TextOrNumber,
};

/// Derives strict deserialization, and serialization of the fields that are set.
macro_rules! written {
    ($($(#[$meta:meta])* $name:ident { $($(#[$attr:meta])* $field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $($(#[$attr])* #[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$type>),*
        }
    )*};
}

written! {
    Document {
        #[serde(rename = "apiVersion")] api_version: Text,
        kind: Text,
        meta: Meta,
        hosts: Vec<HostValue>,
        // Fields of the spec that a Process may have at its top level.
        run: Text,
        dir: Text,
        user: Text,
        mode: Text,
        #[serde(rename = "type")] process_type: Text,
        schedule: Text,
        zone: Text,
        env: Map<EnvEntry>,
        state: Text,
        instances: i64,
        depends_on: Vec<Text>,
        protect: Vec<Text>,
        adopt: bool,
        moved_from: Text,
        on_change: Map<Text>,
        rollout: RolloutEntry,
        stop_signal: Text,
        stop_timeout: TextOrNumber,
        reload_signal: Text,
        health: Box<HealthValue>,
        restart: Box<RestartValue>,
        log: Box<LogEntry>,
        limits: Box<LimitsEntry>,
        env_file: Text,
        sandbox: Box<SandboxEntry>,
        hooks: Box<HooksEntry>,
        spec: Box<SpecEntry>,
        // Defaults, HostGroup and Overlay
        vars: Map<Scalar>,
        // Overlay
        base: Box<BaseValue>,
        patches: Vec<PatchEntry>,
        // HostGroup
        from: FromEntry,
        // Policy
        owner: Text,
        allow: AllowEntry,
        budgets: BudgetsEntry,
        windows: Vec<WindowEntry>,
        // Fields of a pasted request: accepted and ignored.
        op_type: i64,
        bk_app_code: Text,
        bk_app_secret: Text,
        bk_token: Text,
        bk_username: Text,
    }
    Meta { namespace: Text, name: Text, labels: Map<TextOrNumber> }
    HostEntry {
        ip: Text,
        bk_cloud_id: i64,
        bk_supplier_id: i64,
        bk_agent_id: Text,
        group: Text,
        labels: HostLabels,
        vars: Map<Scalar>,
    }
    PatchEntry { #[serde(rename = "match")] target: MatchEntry, patch: PatchFields, optional: bool }
    MatchEntry { namespace: Text, name: Text, labels: Text }
    FromEntry { inventory: Text, select: Text }
    RolloutEntry {
        batch: TextOrNumber,
        canary: TextOrNumber,
        soak: TextOrNumber,
        max_failures: i64,
        auto_rollback: bool,
        order: Vec<Text>,
        max_unavailable: TextOrNumber,
        pause: Text,
    }
    SpecEntry {
        identity: IdentityEntry,
        control: ControlEntry,
        resource: ResourceEntry,
        #[serde(alias = "alive_monitor_policy")] monitor_policy: MonitorEntry,
        warn_report_policy: WarnEntry,
        configmap: Vec<ConfigEntry>,
        env: Map<EnvEntry>,
        job: JobEntry,
        health: Box<HealthValue>,
        restart: Box<RestartValue>,
        log: Box<LogEntry>,
        limits: Box<LimitsEntry>,
        env_file: Text,
        sandbox: Box<SandboxEntry>,
        hooks: Box<HooksEntry>,
    }
    IdentityEntry {
        proc_name: Text,
        setup_path: Text,
        pid_path: Text,
        config_path: Text,
        log_path: Text,
        user: Text,
        #[serde(alias = "index_key")] value_key: Text,
    }
    ControlEntry {
        start_cmd: Text,
        stop_cmd: Text,
        restart_cmd: Text,
        reload_cmd: Text,
        kill_cmd: Text,
        version_cmd: Text,
        health_cmd: Text,
        start_mode: Text,
        stop_signal: Text,
        stop_timeout: TextOrNumber,
        reload_signal: Text,
    }
    ResourceEntry { cpu: Real, mem: Real, fd: i64, disk: i64, net: i64 }
    MonitorEntry {
        auto_type: i64,
        start_check_secs: i64,
        stop_check_secs: i64,
        start_retries: i64,
        start_interval: i64,
        #[serde(alias = "crotab_rule")] crontab_rule: Text,
        crontab_zone: Text,
        op_timeout: i64,
    }
    WarnEntry { report_id: i64 }
    ConfigEntry { path: Text, md5: Text }
    JobEntry {
        proc_owner: Text,
        func_id: Text,
        instance_id: Text,
        instance_num: i64,
        cycle_time: i64,
        start_check_begin_time: i64,
        start_check_end_time: i64,
    }
    HealthEntry {
        cmd: Text,
        http: Text,
        tcp: Text,
        start_period: TextOrNumber,
        interval: TextOrNumber,
        timeout: TextOrNumber,
        retries: i64,
    }
    RestartEntry { policy: Text, attempts: i64, success_codes: Vec<i64> }
    LogEntry { max_size: TextOrNumber, keep: i64 }
    LimitsEntry { memory: TextOrNumber, cpu: Real }
    SandboxEntry {
        no_new_privs: bool,
        capabilities: Vec<Text>,
        umask: Text,
        nice: i64,
        oom_score_adj: i64,
        ulimits: Map<TextOrNumber>,
        private_tmp: bool,
        read_only_paths: Vec<Text>,
        protect_system: ProtectValue,
    }
    HooksEntry { before_start: HookValue, before_stop: HookValue, after_start: HookValue }
    HookEntry { run: Text, timeout: TextOrNumber, on_failure: Text, drift: bool }
    AllowEntry { namespaces: Vec<Text>, users: Vec<Text>, hosts: Vec<Text> }
    BudgetsEntry { delete: TextOrNumber, restart: TextOrNumber }
    WindowEntry {
        days: Text,
        from: Text,
        to: Text,
        tz: Text,
        #[serde(rename = "for")] operations: Vec<Text>,
        deny: bool,
    }
    /// The long form of an environment value.
    EnvSource { file: Text, exec: Vec<Text>, value: TextOrNumber, secret: bool }
}

impl HooksEntry {
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut HookValue> {
        let HooksEntry { before_start, before_stop, after_start } = self;
        [before_start, before_stop, after_start].into_iter().flatten()
    }
}
