//! The user's approval of a plan.

use std::io::{BufRead, IsTerminal, Write};

use super::ApplyArgs;
use crate::cli::Failure;
use crate::cli::commands::plan::args::PlanForm;
use crate::cli::commands::plan::input::PlanInput;
use crate::cli::commands::plan::text;
use crate::cli::output::print::{BOLD, Printer};
use crate::model::Plan;

/// Shows the plan and asks for approval, unless it was given already.
pub fn approve(
    args: &ApplyArgs,
    saved: bool,
    input: &PlanInput,
    planned: &Plan,
    printer: &Printer,
) -> Result<(), Failure> {
    if args.output == PlanForm::Text {
        printer.styled(&text::text(input, planned, 0));
    }
    if args.yes || saved {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        let message = "cannot ask for approval: not a terminal";
        // A rollback has no paths and no saved plans.
        let hint = match args.input.paths.is_empty() {
            true => "pass --yes",
            false => "pass --yes, or approve a saved plan: apply FILE",
        };
        return Err(Failure::refused("NoApproval", message).hint(hint));
    }
    printer.to_stderr(&format!("{BOLD}Apply this plan?{BOLD:#} [y/N] "));
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    let _ = std::io::stdin().lock().read_line(&mut answer);
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::refused("NoApproval", "not approved: nothing was done")),
    }
}
