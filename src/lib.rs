//! Abide: processes that abide by git.
//!
//! Users commit manifests; Abide compares them with the registered and running processes, and issues the fewest
//! operations that make both equal. This page is the map of the crate; each module's header has the details.
//! `docs/glossary.md` defines the terms, `docs/architecture.md` the design, `docs/planner.md` the plans.
//!
//! # The journey of a manifest
//! ```text
//! web.yaml ─find→ text ─parse→ Document ─check→ declaration ─expand→ Desired ┐
//! a target ─observe→ Observed{instances, gaps} ─overlay(expectations)────────┼─ reconcile
//! flags, policies, holds: Rules ─────────────────────────────────────────────┘
//!
//! reconcile: each instance ─assess→ Situation ─choose→ operations ─reasons→ PlanDraft{chains, held}
//!            PlanDraft ─constraints→ ─waves→ Plan{waves, held, notes}
//! execute:   Plan ─→ calls of a Backend, each journaled first ─→ results
//! engine:    recover, observe, plan, confirm, execute ─observe again→ nothing to do
//! ```
//!
//! # Architecture
//! - [`model`]: domain types: keys, spec, desired and observed state, plan. Plain data, without dependencies.
//! - [`contract`]: types of the public JSON of commands, servers and files, with their schemas.
//! - [`manifest`]: parsing, validation and expansion of manifests to [`Desired`](model::Desired), and every error with its
//!   source location.
//! - [`import`]: files of other supervisors and request bodies of GSE and JOB to manifests, and back.
//! - [`inventory`]: hosts from files, commands, HTTP endpoints, Ansible and a CMDB; their last good versions.
//! - [`reconcile`]: the planner: a pure function to a plan of ordered steps and held changes, each with its reasons.
//! - [`gse`]: wire formats of GSE and JOB: requests, responses, codes, keys.
//! - [`agent_protocol`]: messages between a gateway and its agents.
//! - [`backend`]: targets: the Abide gateway, BlueKing's GSE and JOB, and a simulated fleet.
//! - [`observe`]: observations of a target: rows, ledger and recent steps, live checks, recovered old specs, cache.
//! - [`execute`]: execution of a plan, each step exactly once across failures and crashes.
//! - [`engine`]: an apply: recover, observe, plan, confirm, lease, execute, verify, record; manual operations, stored
//!   revisions and rollback.
//! - [`source`]: where manifests come from: a directory or a git branch, with the last good version of broken files.
//! - [`control`]: the control loop: follows a source and reconciles continuously.
//! - [`alerts`]: messages about incidents of the controller: conditions, deduplication, routes, receivers.
//! - [`dashboard`]: status of the control loop: page, JSON API, events, metrics, notifications and pause requests.
//! - [`store`]: durable state: keys and values with ordered changes, watches and leases; SQLite in a file with encrypted values,
//!   or the store of a gateway over HTTP.
//! - [`http`]: HTTP servers and clients: TLS, limits, credentials, files that are reloaded.
//! - [`access`]: apps and people with their credentials and grants, and the decision on every request.
//! - [`gateway`]: the API of GSE and JOB on top of a store, the agent connections, and the Abide API.
//! - [`pki`]: certificates of agents: the CA of a fleet, keys, join tokens.
//! - [`agent`]: processes of a host: launch, stop, supervision, limits, recovery after a crash.
//! - [`cli`]: the commands, one file per verb in `cli::commands`. The only module that prints; no other depends on it.
//! - `retry_delay`: delays between attempts: growth, cap and jitter.
//! - [`clock`]: the wall clock, time zones and crontab schedules.
//! - `error_chain`: an error and its causes in one line.
//! - `escape`: escaping of untrusted text for terminals, HTML, XML and markdown.
//! - `failpoint`: crash points for tests, in debug builds only.
//! - `ids`: generated ids and secrets.
//! - `malloc`: allocator settings of long-running processes.
//! - `metrics`: encoder of the Prometheus text format.
//! - `permissions`: which other users can change or read a file or folder.
//! - `subprocess`: commands with input and output, bounded in time and memory.
//! - `proc`: kernel information from /proc: boot id, host name, state of processes.
//!
//! # Invariants
//! - `model` and `reconcile` depend only on std, serde and blake3: no I/O, no clock.
//! - Unset stays unset: only values from the user, a Defaults document or a documented default are sent.
//! - No input causes a panic: an invalid file is an error with a source location, and affects no other file.
//! - The same files give the same bytes, in any order of discovery; the same observation gives the same plan.
//! - No step for an instance that was not observed, is not owned, or is held; every step has a reason.

pub mod access;
pub mod agent;
pub mod agent_protocol;
pub mod alerts;
pub mod backend;
pub mod cli;
pub mod clock;
pub mod contract;
pub mod control;
pub mod dashboard;
pub mod engine;
mod error_chain;
mod escape;
pub mod execute;
mod failpoint;
pub mod gateway;
pub mod gse;
pub mod http;
mod ids;
pub mod import;
pub mod inventory;
mod malloc;
pub mod manifest;
mod metrics;
pub mod model;
pub mod observe;
mod permissions;
pub mod pki;
mod proc;
pub mod reconcile;
mod retry_delay;
pub mod source;
pub mod store;
mod subprocess;
