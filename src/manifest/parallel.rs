//! Parallel map: applies a function to all items on all cores, and returns the results in input order.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Items per chunk: large enough to make scheduling cheap, small enough to balance the cores.
const BATCH_SIZE: usize = 32;

pub fn map<T: Sync, R: Send>(things: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let cores =
        thread::available_parallelism().map_or(1, NonZero::get).min(things.len().div_ceil(BATCH_SIZE));
    if cores <= 1 {
        return things.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let handfuls: Vec<&[T]> = things.chunks(BATCH_SIZE).collect();
    let take = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(handful) = handfuls.get(at) else {
                return done;
            };
            done.push((at, handful.iter().map(&work).collect::<Vec<R>>()));
        }
    };
    let mut done = thread::scope(|scope| {
        let others: Vec<_> = (1..cores).map(|_| scope.spawn(take)).collect();
        let mut done = take();
        for other in others {
            match other.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().flat_map(|(_, results)| results).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn results_keep_input_order() {
        let things: Vec<u32> = (0..10_000).collect();
        assert!(super::map(&things, |n| n * 2).into_iter().eq((0..10_000).map(|n| n * 2)));
        assert!(super::map(&[] as &[u32], |n| *n).is_empty());
    }
}
