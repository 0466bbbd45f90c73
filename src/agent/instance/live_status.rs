//! Live status check (operation 2): facts and fresh figures of an instance.

use serde_json::{Value, json};

use super::InstanceTask;
use crate::agent::error::AgentError;
use crate::agent::figures::tree_usage::{MeasuredTree, TreeUsage};
use crate::agent::meter::{memory, processors};
use crate::agent::proc_scan;
use crate::agent::process::command_line;
use crate::agent_protocol::{OwnedSpec, rounded_percent};
use crate::clock;
use crate::gse::response::{LiveFigures, LiveInstance, LiveProcess, LiveStatus};
use crate::model::{HostKey, Time};
use crate::proc::ProcStat;

impl InstanceTask {
    /// The live status check, in the format of operation 2.
    pub(super) async fn live_status(&self, owned: &OwnedSpec) -> Result<Value, AgentError> {
        let foreign_pid = self.foreign_pid(owned).await?;
        let pid = self.handle.as_ref().map(|handle| handle.identity.pid).or(foreign_pid);
        let own_pid = pid.filter(|_| foreign_pid.is_none());
        let elapsed_ms = clock::now().0.saturating_sub(self.state.started).max(0);
        let mut instance = LiveInstance {
            pid: pid.map_or(-1, i64::from),
            is_auto: self.state.hosted && foreign_pid.is_none(),
            process_name: owned.spec.identity.proc_name.clone(),
            cmdline: match pid {
                Some(pid) => proc_scan::run(move || command_line(pid)).await.unwrap_or_default(),
                None => String::new(),
            },
            start_time: own_pid.map(|_| Time(self.state.started).to_string()).unwrap_or_default(),
            // 0 for a process that this agent did not start, and for none.
            elapsed_time: json!(own_pid.map_or(0, |_| elapsed_ms / 1000)),
            not_owned: foreign_pid.is_some(),
            ..LiveInstance::default()
        };
        self.add_figures(&mut instance, pid).await;
        let ip = match &self.key.host {
            HostKey::Address { ip, .. } => ip.to_string(),
            HostKey::Agent(id) => id.to_string(),
        };
        let process =
            LiveProcess { procname: owned.spec.identity.proc_name.clone(), instance: vec![instance] };
        let utctime = Time(clock::now().0).to_string();
        let utctime2 = utctime.replace('T', " ").trim_end_matches('Z').to_owned();
        Ok(json!(LiveStatus { ip, utctime, utctime2, timezone: 0, process: vec![process] }))
    }

    /// Measures the tree of the process now.
    async fn add_figures(&self, instance: &mut LiveInstance, pid: Option<u32>) {
        let tree = self.measured_tree().or_else(|| MeasuredTree::of_pid(pid?));
        let usage = match &tree {
            Some(tree) => tree.current_usage().await.ok().flatten().unwrap_or_default(),
            None => TreeUsage::default(),
        };
        let average = tree.as_ref().map_or(0.0, |tree| usage.cpu_secs() / tree.age_secs().max(1.0));
        let now =
            self.figures.measure().await.map_or(average, |figures| f64::from(figures.cpu_milli) / 1000.0);
        let of_host = |cores: f64| rounded_percent(cores / processors() * 100.0);
        instance.cpu_usage = of_host(now);
        instance.phy_mem_usage = rounded_percent(usage.bytes as f64 / memory() as f64 * 100.0);
        let Some(stat) = pid.and_then(ProcStat::of) else { return };
        // The health and version of a process that is not owned are unknown.
        let (version, health) = match instance.not_owned {
            true => (String::new(), ""),
            false => (self.monitors.version.clone(), self.health()),
        };
        let resident = stat.resident_pages.saturating_mul(rustix::param::page_size() as u64);
        *instance.figures = LiveFigures {
            version,
            health: health.to_owned(),
            cpu_usage_ave: of_host(average),
            use_phy_mem: usage.bytes / 1024,
            free_v_mem: (stat.virtual_bytes.saturating_sub(resident) / 1024).to_string(),
            thread_count: usage.threads.into(),
            disk_size: -1,
            stat: stat.state.to_string(),
            utime: stat.user_ticks.to_string(),
            stime: stat.cpu_ticks.saturating_sub(stat.user_ticks).to_string(),
        };
    }
}
