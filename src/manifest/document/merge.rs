//! Merge of Defaults into a document, field by field.

use super::{
    ControlEntry, HooksEntry, IdentityEntry, JobEntry, LimitsEntry, LogEntry, Map, MonitorEntry,
    ResourceEntry, SandboxEntry, SpecEntry, WarnEntry,
};

/// Fills unset fields from `under`. Maps merge by key; lists and single values are replaced.
pub trait Overlay {
    fn fill_from(&mut self, under: &Self);
}

macro_rules! overlay {
    ($($name:ident { $($inner:ident),* ; $($leaf:ident),* })*) => {$(
        impl Overlay for $name {
            fn fill_from(&mut self, under: &Self) {
                // Destructured without `..`: a new field does not compile until it is listed.
                let $name { $($inner,)* $($leaf),* } = under;
                $(if let Some(under) = $inner {
                    match &mut self.$inner {
                        Some(own) => own.fill_from(under),
                        own => *own = Some(under.clone()),
                    }
                })*
                $(if self.$leaf.is_none() {
                    self.$leaf.clone_from($leaf);
                })*
            }
        }
    )*};
}

overlay! {
    SpecEntry {
        identity, control, resource, monitor_policy, warn_report_policy, env, job, log, limits, sandbox, hooks
        ; configmap, health, restart, env_file
    }
    LogEntry { ; max_size, keep }
    LimitsEntry { ; memory, cpu }
    SandboxEntry {
        ulimits
        ; no_new_privs, capabilities, umask, nice, oom_score_adj, private_tmp, read_only_paths, protect_system
    }
    HooksEntry { ; before_start, before_stop, after_start }
    IdentityEntry { ; proc_name, setup_path, pid_path, config_path, log_path, user, value_key }
    ControlEntry {
        ; start_cmd, stop_cmd, restart_cmd, reload_cmd, kill_cmd, version_cmd, health_cmd, start_mode,
        stop_signal, stop_timeout, reload_signal
    }
    ResourceEntry { ; cpu, mem, fd, disk, net }
    MonitorEntry {
        ; auto_type, start_check_secs, stop_check_secs, start_retries, start_interval, crontab_rule, crontab_zone,
        op_timeout
    }
    WarnEntry { ; report_id }
    JobEntry {
        ; proc_owner, func_id, instance_id, instance_num, cycle_time, start_check_begin_time, start_check_end_time
    }
}

impl<V: Clone> Overlay for Map<V> {
    fn fill_from(&mut self, under: &Self) {
        for (key, value) in &under.0 {
            self.0.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
}
