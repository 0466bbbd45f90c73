//! One binary for all integration tests. Each file is one claim about the product.

mod agent;
mod bombs;
mod cases;
mod channel;
mod codes;
mod convert;
mod deaths;
mod gateway;
mod laws;
mod mutations;
mod plan;
mod planner;
mod reading;
mod rooms;
mod samples;
mod schema;
mod serve;
mod server;
mod sim;
mod store;
mod support;
mod system;
mod tending;
mod verbs;
mod wire;
mod worlds;
