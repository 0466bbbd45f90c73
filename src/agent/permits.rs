//! Permits per user: stuck work of one user does not block the work of another.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// At most `limit` permits per user id.
pub struct Permits {
    limit: usize,
    users: Mutex<HashMap<u32, Arc<Semaphore>>>,
}

impl Permits {
    pub fn new(limit: usize) -> Permits {
        Permits { limit, users: Mutex::default() }
    }

    /// Waits for a permit of this user. `None` never happens: the semaphores are not closed.
    pub async fn acquire(&self, uid: u32) -> Option<OwnedSemaphorePermit> {
        self.of(uid).acquire_owned().await.ok()
    }

    fn of(&self, uid: u32) -> Arc<Semaphore> {
        let mut users = self.users.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Arc::clone(users.entry(uid).or_insert_with(|| Arc::new(Semaphore::new(self.limit))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_user_cannot_take_the_permits_of_another() {
        let permits = Permits::new(2);
        let held = [permits.acquire(1000).await, permits.acquire(1000).await];
        let third = tokio::time::timeout(std::time::Duration::from_millis(20), permits.acquire(1000)).await;
        assert!(third.is_err(), "a third permit of the same user");
        assert!(permits.acquire(1001).await.is_some());
        drop(held);
        assert!(permits.acquire(1000).await.is_some());
    }
}
