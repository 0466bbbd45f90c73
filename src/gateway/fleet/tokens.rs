//! Join tokens: creation, list, and removal of old ones.

use tracing::info;

use super::records::JoinTokenRecord;
use super::{FleetMembership, now};
use crate::contract::{CreatedJoinToken, JoinTokenRequest, JoinTokenRow};
use crate::gateway::{ApiError, readable};
use crate::model::Time;
use crate::pki::{JoinToken, MAX_HOSTS};
use crate::store::{Entry, Seq, Store, Txn, keys};

/// Default and maximum life of a join token, in seconds.
const DEFAULT_TTL_SECS: u64 = 3_600;
const MAX_TTL_SECS: u64 = 7 * 86_400;
/// Maximum open join tokens.
const MAX_OPEN: usize = 1_000;
/// Maximum join tokens that are used, expired or revoked; the oldest are removed.
const MAX_FINISHED: usize = 1_000;
/// Time for which such a token is listed, in seconds.
const FINISHED_SECS: u64 = 30 * 86_400;

impl<S: Store> FleetMembership<S> {
    /// Creates a join token. `by`: the app and the user that it names.
    pub async fn create_token(
        &self,
        request: &JoinTokenRequest,
        by: &str,
    ) -> Result<CreatedJoinToken, ApiError> {
        self.issuer()?;
        let bad = |why: String| Err(ApiError::BadRequest(why));
        if request.hosts.is_empty() || request.hosts.len() > MAX_HOSTS {
            return bad(format!("a join token has 1 to {MAX_HOSTS} hosts"));
        }
        let ttl_secs = request.ttl_secs.unwrap_or(DEFAULT_TTL_SECS);
        if !(1..=MAX_TTL_SECS).contains(&ttl_secs) {
            return bad(format!("ttl_secs must be between 1 and {MAX_TTL_SECS}"));
        }
        let now = now();
        let stored = self.tokens().await?;
        if stored.iter().filter(|(_, record, _)| record.state(now) == "open").count() >= MAX_OPEN {
            return Err(ApiError::Busy(format!("{MAX_OPEN} join tokens are open: revoke some, or wait")));
        }
        let token = JoinToken::generate();
        let mut hosts = request.hosts.clone();
        hosts.sort();
        hosts.dedup();
        let record = JoinTokenRecord {
            digest: token.digest(),
            hosts: hosts.clone(),
            created: now.0,
            expires: now.after_secs(ttl_secs).0,
            by: by.to_owned(),
            used: None,
            revoked: None,
        };
        let key = keys::join_token(token.id());
        let written = Txn::put(key.clone(), serde_json::to_vec(&record)?).only_if(key, 0);
        if !self.commit(written.and(obsolete_tokens(&stored, now))).await? {
            return Err(super::contended());
        }
        let expires = Time(record.expires).to_string();
        Ok(CreatedJoinToken { id: token.id().to_owned(), token: token.reveal(), hosts, expires })
    }

    /// All join tokens, the newest first.
    pub async fn list_tokens(&self) -> Result<Vec<JoinTokenRow>, ApiError> {
        let now = now();
        let mut tokens = self.tokens().await?;
        tokens.sort_by_key(|(_, record, _)| std::cmp::Reverse(record.created));
        let row = |(id, record, _): (String, JoinTokenRecord, Seq)| JoinTokenRow {
            id,
            state: record.state(now).to_owned(),
            hosts: record.hosts,
            created: Time(record.created).to_string(),
            expires: Time(record.expires).to_string(),
            by: record.by,
            used: record.used.as_ref().map(|used| Time(used.at).to_string()),
            agent: record.used.map(|used| used.agent),
        };
        Ok(tokens.into_iter().map(row).collect())
    }

    /// The stored tokens with their ids and changes.
    pub(super) async fn tokens(&self) -> Result<Vec<(String, JoinTokenRecord, Seq)>, ApiError> {
        let entries = self.store.range(keys::JOIN_TOKEN_PREFIX, None, usize::MAX).await?.entries;
        let token = |entry: Entry| {
            let id = keys::join_token_of(&entry.key)?.to_owned();
            Some((id, readable(entry.decode())?, entry.mod_seq))
        };
        Ok(entries.into_iter().filter_map(token).collect())
    }

    /// The record of a join token, and the change that wrote it. `None`: the id or the secret is wrong.
    pub(super) async fn find_token(
        &self,
        token: &JoinToken,
    ) -> Result<Option<(JoinTokenRecord, Seq)>, ApiError> {
        let entry = self.store.get(&keys::join_token(token.id())).await?;
        let Some(entry) = entry else { return Ok(None) };
        let Some(record) = readable(entry.decode::<JoinTokenRecord>()) else { return Ok(None) };
        Ok(token.matches(&record.digest).then_some((record, entry.mod_seq)))
    }

    /// Removes old join tokens, and revocations of certificates that have expired.
    pub(super) async fn remove_expired(&self) -> Result<(), ApiError> {
        let now = now();
        let mut txn = obsolete_tokens(&self.tokens().await?, now);
        for entry in self.store.range(keys::REVOKED_PREFIX, None, usize::MAX).await?.entries {
            let record = readable(entry.decode::<super::records::RevokedCertificate>());
            if record.is_some_and(|record| record.not_after < now.0) {
                txn = txn.and(Txn::delete(&*entry.key));
            }
        }
        if !txn.writes.is_empty() {
            info!(records = txn.writes.len(), "removed old join tokens and expired revocations");
            self.commit(txn).await?;
        }
        Ok(())
    }
}

/// Deletes finished tokens that are old, or more than [`MAX_FINISHED`].
fn obsolete_tokens(tokens: &[(String, JoinTokenRecord, Seq)], now: Time) -> Txn {
    // A used token answers a repeated exchange until it expires.
    let mut finished: Vec<_> = tokens
        .iter()
        .filter(|(_, record, _)| record.state(now) != "open" && record.expires <= now.0)
        .collect();
    finished.sort_by_key(|(_, record, _)| std::cmp::Reverse(record.expires));
    let is_old = |record: &JoinTokenRecord| Time(record.expires).after_secs(FINISHED_SECS) < now;
    let obsolete =
        finished.iter().enumerate().filter(|(nth, (_, record, _))| *nth >= MAX_FINISHED || is_old(record));
    obsolete.fold(Txn::default(), |txn, (_, (id, _, seq))| {
        let key = keys::join_token(id);
        txn.and(Txn::delete(key.clone()).only_if(key, *seq))
    })
}
