//! Memory of an idle agent: when freed memory and unused code are returned to the kernel.
//!
//! A burst of work leaves freed memory, and most of the code mapped. Both are returned when it is over. During the burst every
//! thread would wait for the heap, and the launches with them; so a busy agent returns memory once a minute only.

/// Heartbeats of a busy agent between two returns of freed memory.
const BUSY_HEARTBEATS: u32 = 20;
/// Heartbeats of an idle agent between two releases of code: heartbeats themselves need a part of it.
const IDLE_HEARTBEATS: u32 = 40;
/// Heartbeats between the first release after a burst and the second one: the first figures of new processes are sent in
/// between, and need code that later ones do not.
const FIRST_IDLE_HEARTBEATS: u32 = 8;

/// The work since the last heartbeat, and the times of the next returns. Counted in heartbeats.
pub struct IdleMemory {
    is_busy: bool,
    /// There was work before the last heartbeat.
    was_busy: bool,
    /// Heartbeats with work since freed memory was returned.
    busy: u32,
    /// Heartbeats until the next release of code.
    until_release: u32,
    /// Code was released since the last work.
    is_released: bool,
}

impl IdleMemory {
    /// At the start of a session, which is work.
    pub fn of_session() -> IdleMemory {
        IdleMemory { is_busy: true, was_busy: true, busy: 0, until_release: 0, is_released: false }
    }

    /// There is work.
    pub fn set_busy(&mut self) {
        self.is_busy = true;
    }

    /// Returns freed memory with a heartbeat, if it is due.
    pub fn at_heartbeat(&mut self) {
        if self.begin_heartbeat() {
            crate::malloc::give_freed_back();
        }
    }

    /// Returns unused code after a heartbeat of an idle agent, if it is due. The next heartbeat is seconds away.
    pub fn after_heartbeat(&mut self) {
        if self.end_heartbeat() {
            super::process::release_code();
        }
    }

    fn begin_heartbeat(&mut self) -> bool {
        let is_busy = std::mem::take(&mut self.is_busy);
        self.was_busy = is_busy;
        self.busy += u32::from(is_busy);
        self.until_release = if is_busy { 0 } else { self.until_release.saturating_sub(1) };
        self.is_released &= !is_busy;
        let is_due = self.busy >= BUSY_HEARTBEATS || self.busy > 0 && !is_busy;
        if is_due {
            self.busy = 0;
        }
        is_due
    }

    fn end_heartbeat(&mut self) -> bool {
        // A busy agent needs its code for the next launch.
        let is_due = !self.is_busy && !self.was_busy && self.until_release == 0;
        if is_due {
            self.until_release = if self.is_released { IDLE_HEARTBEATS } else { FIRST_IDLE_HEARTBEATS };
            self.is_released = true;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_returned_after_a_burst_and_rarely_during_one() {
        let mut memory = IdleMemory::of_session();
        let mut heartbeat = |is_busy: bool| {
            if is_busy {
                memory.set_busy();
            }
            (memory.begin_heartbeat(), memory.end_heartbeat())
        };
        let busy: Vec<(bool, bool)> = (0..40).map(|_| heartbeat(true)).collect();
        assert_eq!(busy.iter().filter(|(is_freed, _)| *is_freed).count(), 2, "{busy:?}");
        assert!(busy.iter().all(|(_, is_released)| !is_released), "{busy:?}");
        assert_eq!(heartbeat(true), (false, false));
        assert_eq!(heartbeat(false), (true, true), "the burst is over");
        let idle: Vec<(bool, bool)> = (0..80).map(|_| heartbeat(false)).collect();
        assert!(idle.iter().all(|(is_freed, _)| !is_freed), "nothing was freed");
        let released: Vec<usize> = (0..80).filter(|nth| idle[*nth].1).collect();
        assert_eq!(released, [7, 47], "after the first release, which the heartbeat before them made");
    }
}
