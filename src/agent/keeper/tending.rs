//! What is looked at while a process runs: how much it uses, its health, its version, its files.
//!
//! Only what somebody asked for is looked at; who sets none of it costs nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tracing::warn;

use super::Keeper;
use crate::agent::checks::{self, Note};
use crate::agent::life::Event;
use crate::agent::meter::{EVERY, is_limited, judge, limit};
use crate::gse::codes::RowCode;

/// How often what such a daemon wrote is forgotten.
const FORGET: Duration = Duration::from_secs(2);

impl Keeper {
    /// Only what somebody asked for is looked at.
    pub(super) fn plan_looks(&mut self) {
        let now = Instant::now();
        let live = self.row.run.as_ref().filter(|_| self.hold.is_some()).map(|run| &run.live.spec);
        let limited = live.is_some_and(|spec| is_limited(&spec.resource));
        let pooled = live.is_some() && self.row.hosted && self.shared.pools.has(&self.key);
        let looked_at = live.is_some_and(|spec| checks::has_any(spec));
        let tended = &mut *self.tended;
        let plan = |at: &mut Option<Instant>, wanted: bool, after: Duration| match wanted {
            true => drop(at.get_or_insert(now + after)),
            false => *at = None,
        };
        plan(&mut tended.sample_at, limited && self.row.hosted || pooled, EVERY);
        let after = if tended.looks == 0 { checks::FIRST } else { self.shared.look_every };
        plan(&mut tended.look_at, looked_at && tended.looking.is_none(), after);
        plan(&mut tended.forget_at, self.output.is_some(), FORGET);
    }

    /// How much it uses, and whether that is too much.
    pub(super) async fn sample(&mut self) {
        self.tended.sample_at = None;
        let (Some(hold), Some(run)) = (&self.hold, &self.row.run) else { return };
        let (limits, live) = (run.live.spec.resource.clone(), run.live.clone());
        let share = self.tended.meter.look(hold.identity.pid, run.group().as_ref());
        self.tended.share = Some(share);
        let (cpu, mem) = (limit(limits.cpu), limit(limits.mem));
        let excess;
        (self.tended.meter.counts, excess) = judge(self.tended.meter.counts, share, cpu, mem);
        let pooled = self.shared.pools.tell(&self.key, (share, cpu, mem), Instant::now());
        let Some(why) = excess.map(|excess| format!("it was {excess}")).or(pooled) else { return };
        warn!(instance = %self.key, %why, "stopped for its limit");
        let said = self.bring_down(&live, live.spec.control.stop_cmd.as_deref(), Signal::TERM, None).await;
        if said.0 != RowCode::DONE && self.is_running() {
            // A command that does not stop it is no way to keep what it uses.
            let _ = self.bring_down(&live, None, Signal::KILL, None).await;
        }
        self.row.message = why;
        if !self.is_running() {
            self.guard(Event::Ended { up_ms: 0 }).await;
        }
    }

    /// Begins a look at its health, version and files.
    pub(super) fn look_after(&mut self) {
        self.tended.look_at = None;
        let (Some(hold), Some(run)) = (&self.hold, &self.row.run) else { return };
        let with_version = self.tended.looks.is_multiple_of(checks::VERSION_EVERY);
        self.tended.looks = self.tended.looks.saturating_add(1);
        let files = std::mem::take(&mut self.tended.files);
        let (key, live, pid) = (self.key.clone(), run.live.clone(), hold.identity.pid);
        let shared = Arc::clone(&self.shared);
        self.tended.looking = Some(tokio::spawn(async move {
            let rights = match shared.rights_of(&live.spec) {
                Ok(rights) => rights,
                Err(why) => return Note { health: Some(Err(why)), files, ..Note::default() },
            };
            let _permit = shared.looks.acquire(rights.account().uid()).await;
            checks::look(key, live, rights, pid, with_version, files).await
        }));
    }

    pub(super) fn found(&mut self, note: Note) {
        let tended = &mut *self.tended;
        tended.looking = None;
        let Note { health, version, config, files } = note;
        let version = version.unwrap_or_else(|| tended.version.clone());
        let changed = (&tended.health, &tended.version, &tended.config) != (&health, &version, &config);
        (tended.health, tended.version, tended.config, tended.files) = (health, version, config, files);
        if changed {
            if let Some(Err(why)) = &self.tended.health {
                warn!(instance = %self.key, %why, "not well");
            }
            self.report();
        }
    }
}
