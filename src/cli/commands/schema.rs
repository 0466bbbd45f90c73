//! `abide schema`: the JSON Schema of manifests.

use crate::cli::output::print::Printer;
use crate::cli::{Exit, Failure};
use crate::manifest::schema;

pub fn run(printer: &Printer) -> Result<Exit, Failure> {
    let schema = serde_json::to_string_pretty(&schema::schema());
    let schema =
        schema.map_err(|error| Failure::new(Exit::Failed, format!("cannot write the schema: {error}")))?;
    printer.data(&(schema + "\n"));
    Ok(Exit::Done)
}
