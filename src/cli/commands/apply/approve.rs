//! Checks before the first step: budgets, and the user's approval.

use std::io::{BufRead, IsTerminal, Write};

use super::ApplyArgs;
use crate::cli::Failure;
use crate::cli::commands::plan::args::PlanForm;
use crate::cli::commands::plan::input::PlanInput;
use crate::cli::commands::plan::text;
use crate::cli::output::print::{BOLD, Printer, count};
use crate::model::{HoldReason, Plan};

/// Refuses the whole plan if it exceeds a budget.
pub fn check_budget(planned: &Plan) -> Result<(), Failure> {
    for (reason, flag) in
        [(HoldReason::DeleteBudget, "--max-delete"), (HoldReason::RestartBudget, "--max-restart")]
    {
        let held = planned.held.iter().filter(|held| held.reason == reason).count();
        if held > 0 {
            let detail = planned
                .held
                .iter()
                .find(|held| held.reason == reason)
                .map_or("", |held| held.detail.as_str());
            let message = format!("{} over a budget: {detail}; nothing was done", count(held, "instance"));
            let hint = format!("`abide plan` shows them; {flag} allows more");
            return Err(Failure::refused(reason.word(), message).hint(hint));
        }
    }
    Ok(())
}

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
