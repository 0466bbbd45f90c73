//! Retention: history has a limit, and an operation that cannot be recorded is not started.

use std::collections::BTreeMap;
use std::time::Duration;

use abide::backend::Abide;
use abide::contract::HistoryEntry;
use abide::engine::history;
use abide::execute::ledger::{self, Entry};
use abide::execute::{
    ActiveHolds, ExecutionContext, ExecutionEvent, ExecutionSettings, StepOutcome, execute,
};
use abide::http::{ApiClient, ApiCredentials, ApiEndpoint, ClientConfig};
use abide::model::{Desired, Host, InstanceKey, Observed, Op, Plan, SpecSide, Step, Time, Wave};
use abide::reconcile::Caps;
use abide::store::{Embedded, Remote, Store};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::system::System;

fn key(name: &str) -> InstanceKey {
    format!("0:10.0.0.1:web:{name}").parse().expect("a key")
}

fn access(url: String) -> ApiEndpoint {
    let (code, secret) = ("all".to_owned(), "s3cret".to_owned());
    let credentials = ApiCredentials::App { code, secret, username: None };
    ApiEndpoint { url, credentials, client_config: ClientConfig::default() }
}

async fn is_trimmed<S: Store>(state: &S) {
    for nth in 0..history::MAX_ENTRIES as i64 + 5 {
        history::add(
            state,
            "team",
            Time(nth),
            &HistoryEntry { failed: Some(nth as usize), ..HistoryEntry::default() },
        )
        .await
        .expect("it is added");
    }
    history::add(state, "other", Time(1), &HistoryEntry::default()).await.expect("it is added");
    let (oldest, count) = state.slice("history/team/", 0, 1).await.expect("entries");
    assert_eq!(count, history::MAX_ENTRIES);
    assert!(oldest[0].key.starts_with("history/team/0000000000005-"), "{}", oldest[0].key);
    assert_eq!(state.slice("history/other/", 0, 1).await.expect("entries").1, 1);
}

#[test]
fn the_newest_history_entries_are_kept() {
    let system = System::new();
    let url = format!("http://{}", system.server.address);
    tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
        let folder = tempfile::tempdir().expect("a folder");
        is_trimmed(&Embedded::open(&folder.path().join("store.db")).expect("a store")).await;
        is_trimmed(&Remote::new(ApiClient::new(&access(url)).expect("a client"))).await;
    });
}

#[tokio::test]
async fn records_of_long_gone_instances_are_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Embedded::open(&folder.path().join("store.db")).expect("a store");
    let entry = |gone: bool, at: Time| Entry { gone, at, ..Entry::default() };
    let now = abide::clock::now();
    let entries =
        [("old", entry(true, Time(1))), ("new", entry(true, now)), ("there", entry(false, Time(1)))];
    let mut known: BTreeMap<InstanceKey, Entry> =
        entries.into_iter().map(|(name, entry)| (key(name), entry)).collect();
    store.txn(ledger::noted("it", &known)).await.expect("it is written");
    // The key was written since it was read.
    known.insert(key("there"), entry(true, Time(1)));
    ledger::forget(&store, "it", &known, now).await;
    let left: Vec<_> = ledger::read(&store, "it").await.expect("a ledger").entries.into_keys().collect();
    assert_eq!(left, [key("new"), key("there")]);
}

#[tokio::test]
async fn without_a_ledger_nothing_is_started() {
    let nobody = access("http://127.0.0.1:1".to_owned());
    let backend = Abide::new(&nobody).expect("a client");
    let state = Remote::new(ApiClient::new(&nobody).expect("a client"));
    let instance = key("a");
    let host = Host { key: instance.host.clone(), supplier: None, agent_id: None };
    let step = Step {
        id: 1,
        instance,
        host,
        op: Op::Start,
        spec_side: SpecSide::New,
        spec: None,
        revision: None,
        reloaded_fields: Vec::new(),
        pid_stays: false,
        needs_live_check: false,
        from: None,
        why: Vec::new(),
    };
    let plan = Plan { waves: vec![Wave { steps: vec![step], ..Wave::default() }], ..Plan::default() };
    let (_stays, stop) = watch::channel(false);
    let (_free, active_holds) = watch::channel(ActiveHolds::default());
    let settings = ExecutionSettings {
        owner: "team".to_owned(),
        target: "it".to_owned(),
        caps: Caps::GSE_V2,
        run: "1".to_owned(),
        deadline: Instant::now() + Duration::from_secs(10),
        max_parallel: 10,
        check: |_| None,
        stop,
        active_holds,
        origin: None,
    };
    let terms = ExecutionContext::new(settings, &Desired::default(), &Observed::default(), &plan);
    let mut sent = false;
    let done = execute(&plan, &backend, &state, &terms, &mut |told| {
        sent |= matches!(told, ExecutionEvent::Sent { .. })
    })
    .await;
    assert!(!sent, "nothing was even tried");
    assert_eq!((done.ended.len(), done.ended[0].outcome), (1, StepOutcome::Failed));
    assert!(done.ended[0].message.starts_with("not started: "), "{}", done.ended[0].message);
}
