//! Names of the fields of a spec, as plans, `on_change` and `explain` use them.

use std::fmt;

macro_rules! fields {
    ($($field:ident = $path:literal),* $(,)?) => {
        /// One field of [`Spec`](super::Spec). A map or a list counts as one field.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Field { $($field),* }

        impl Field {
            pub const ALL: &[Field] = &[$(Field::$field),*];
            pub const COUNT: usize = Field::ALL.len();

            /// Path in a manifest, without the leading `spec.`.
            pub fn path(self) -> &'static str {
                match self { $(Field::$field => $path),* }
            }
        }
    };
}

fields! {
    Labels = "meta.labels",
    ProcName = "identity.proc_name",
    SetupPath = "identity.setup_path",
    PidPath = "identity.pid_path",
    ConfigPath = "identity.config_path",
    LogPath = "identity.log_path",
    User = "identity.user",
    ValueKey = "identity.value_key",
    StartCmd = "control.start_cmd",
    StopCmd = "control.stop_cmd",
    RestartCmd = "control.restart_cmd",
    ReloadCmd = "control.reload_cmd",
    KillCmd = "control.kill_cmd",
    VersionCmd = "control.version_cmd",
    HealthCmd = "control.health_cmd",
    StartMode = "control.start_mode",
    Cpu = "resource.cpu",
    Mem = "resource.mem",
    Fd = "resource.fd",
    Disk = "resource.disk",
    Net = "resource.net",
    AutoType = "monitor_policy.auto_type",
    StartCheckSecs = "monitor_policy.start_check_secs",
    StopCheckSecs = "monitor_policy.stop_check_secs",
    StartRetries = "monitor_policy.start_retries",
    StartInterval = "monitor_policy.start_interval",
    CrontabRule = "monitor_policy.crontab_rule",
    OpTimeout = "monitor_policy.op_timeout",
    ReportId = "warn_report_policy.report_id",
    Configmap = "configmap",
    Env = "env",
    ProcOwner = "job.proc_owner",
    FuncId = "job.func_id",
    InstanceId = "job.instance_id",
    InstanceNum = "job.instance_num",
    CycleTime = "job.cycle_time",
    StartCheckBeginTime = "job.start_check_begin_time",
    StartCheckEndTime = "job.start_check_end_time",
    StopSignal = "control.stop_signal",
    StopTimeout = "control.stop_timeout",
    ReloadSignal = "control.reload_signal",
    CrontabZone = "monitor_policy.crontab_zone",
    Health = "health",
    Restart = "restart",
    Log = "log",
    Limits = "limits",
    EnvFile = "env_file",
    Sandbox = "sandbox",
    Hooks = "hooks",
}

impl Field {
    /// Parses a path, with or without the leading `spec.`.
    pub fn from_path(path: &str) -> Option<Field> {
        let path = path.strip_prefix("spec.").unwrap_or(path);
        Field::ALL.iter().copied().find(|field| field.path() == path)
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.path())
    }
}
