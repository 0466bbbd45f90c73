//! Abide: processes that abide by git.
//!
//! People commit manifests; Abide compares them with what is registered and running, and issues the fewest
//! operations that make the two equal. This page is the map; each room's own page says more.
//!
//! # A manifest's journey
//! ```text
//! web.yaml ─find→ text ─read→ Document ─check→ declaration ─expand→ Desired ┐
//! a target ─observe→ Observed{instances, gaps} ─lay_over(expectations)──────┼─reconcile→ Plan{waves, held, notes}
//! flags, policies, holds: Rules ────────────────────────────────────────────┘
//! ```
//! ```text
//! Plan ─execute→ calls of a Backend, each in the journal first ─→ outcomes ─observe again→ nothing to do
//! ```
//!
//! # The rooms
//! - [`model`]: the nouns: keys, spec, desired and observed state, plan. Plain data, knows nobody.
//! - [`manifest`]: text → [`Desired`](model::Desired), and every problem with its place; rows → [`Observed`](model::Observed).
//! - [`reconcile`]: the pure core: what to do, in which order, what to leave alone, and why.
//! - [`gse`]: the wire of GSE and JOB: requests, answers, codes, keys.
//! - [`backend`]: the window on the world: our own gateway, BlueKing's GSE and JOB, and a simulated fleet.
//! - [`execute`]: from a plan to outcomes, once, whatever breaks on the way; how the world is where a target tells little.
//! - [`control`]: the standing loop: a directory of manifests, or a branch of a git repository, kept true; what was taken
//!   before, and can be gone back to.
//! - [`dashboard`]: what the loop tells: page, JSON, events, metrics, messages; and what can be asked of it.
//! - [`store`]: what must survive: keys and values in one order of changes, watches, leases. SQLite in a file, or a
//!   gateway's store over HTTP.
//! - [`http`]: how we listen and call: TLS, limits, credentials, files that are read again.
//! - [`gateway`]: GSE's and JOB's API over a store, the channel of the agents, and our own API beside it.
//! - [`agent`]: the processes of a host: started, stopped, guarded, limited, found again.
//! - `escape`: foreign text that is printed, or becomes a part of HTML, XML or markdown.
//! - `permissions`: which other users can change or read a file or folder.
//! - [`clock`]: what time it is, and what the clocks of a zone show.
//! - [`cli`]: one file a verb; the only place that prints. Nobody knows it.
//!
//! # What always holds
//! - `model` and `reconcile` see only std, serde and blake3: no I/O, no clock.
//! - Unset stays unset: nothing is said to anybody that the user, a Defaults or a documented default did not say.
//! - No input makes it panic: a bad file is a problem with a place, and spoils no other file.
//! - The same files give the same bytes, in whatever order they are found; the same world gives the same plan.
//! - Nothing is planned on what was not seen, is not ours, or is held; every step says why.

pub mod agent;
pub mod backend;
pub mod cli;
pub mod clock;
pub mod control;
pub mod dashboard;
mod escape;
pub mod execute;
mod failpoint;
pub mod gateway;
pub mod gse;
pub mod http;
mod malloc;
pub mod manifest;
pub mod model;
mod permissions;
pub mod reconcile;
pub mod store;
