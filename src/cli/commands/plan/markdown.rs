//! Plans as Markdown for pull request comments: the summary first, then blocks up to the size limit.

use super::groups::{format_hosts, groups, held, reason};
use super::input::{PlanDigests, PlanInput};
use super::text::{dedup_consecutive, gate, ops, summary};
use crate::escape::code;
use crate::model::Plan;

pub fn markdown(input: &PlanInput, plan: &Plan, digests: &PlanDigests, hidden: usize, most: usize) -> String {
    let mut blocks = Vec::new();
    for group in groups(plan) {
        let waves = match group.waves {
            _ if plan.waves.len() < 2 => String::new(),
            (first, last) if first == last => format!(", wave {first}"),
            (first, last) => format!(", waves {first}-{last}"),
        };
        let (process, place) = (code(&group.process.to_string()), code(&format_hosts(&group.hosts)));
        let mut block = format!("- **{}** {process} {place}{waves}\n", ops(&group.ops));
        for why in &group.reasons {
            let at = why.at.as_ref().map(|at| format!(" ({})", code(&at.to_string())));
            block.push_str(&format!("  - {}{}\n", code(&reason(why)), at.unwrap_or_default()));
        }
        blocks.push(block);
    }
    blocks.extend(held_blocks(plan));
    let gates = plan.waves.iter().flat_map(|wave| &wave.gates).map(gate).fold(Vec::new(), dedup_consecutive);
    blocks.extend(gates.iter().chain(&plan.notes).map(|note| format!("\n> {}\n", code(note))));
    let head = format!(
        "### Abide: {}\n\nOwner {}, {}, fingerprint {}.\n\n",
        summary(input, plan, hidden),
        code(&input.rules.owner),
        code(&input.heading()),
        code(&digests.all),
    );
    cut(head, &blocks, most)
}

/// The held changes of a plan, grouped by reason: a heading and one block per group.
pub fn held_blocks(plan: &Plan) -> Vec<String> {
    let mut blocks = Vec::new();
    let held = held(plan);
    if !held.is_empty() {
        blocks.push("\n**Held**\n\n".to_owned());
    }
    for group in held {
        let (word, process) = (group.held.reason.word(), code(&group.process.to_string()));
        let place = code(&format_hosts(&group.hosts));
        let would = if group.held.steps.is_empty() {
            String::new()
        } else {
            format!(" ({})", ops(&group.held.steps))
        };
        let at = group.held.at.as_ref().map(|at| format!(" ({})", code(&at.to_string()))).unwrap_or_default();
        let mut block = format!("- **{word}** {process} {place}{would}: {}{at}\n", code(&group.detail));
        let changed = group.held.why.iter().filter(|why| why.field.is_some());
        block.extend(changed.map(|why| format!("  - {}\n", code(&reason(why)))));
        blocks.push(block);
    }
    blocks
}

/// As many whole blocks as fit, and the number of omitted ones.
fn cut(head: String, blocks: &[String], most: usize) -> String {
    let more = |n: usize| format!("\n… and {n} more: `abide plan` shows them.\n");
    // Reserves space for the last line.
    let room = most.saturating_sub(more(blocks.len()).len());
    let all: usize = blocks.iter().map(String::len).sum();
    let mut text = head;
    if text.len() + all <= most {
        text.extend(blocks.iter().map(String::as_str));
        return text;
    }
    let mut shown = 0;
    for block in blocks {
        // Of a block that is too long, only its first line.
        let line = block.find('\n').map_or(block.len(), |end| end + 1);
        let part = if block.len() > room / 2 { &block[..line] } else { block };
        if text.len() + part.len() > room {
            break;
        }
        text.push_str(part);
        shown += 1;
    }
    let entries = blocks[shown..].iter().filter(|block| block.starts_with('-')).count();
    text.push_str(&more(entries));
    // The limit is smaller than the summary: truncate it.
    if text.len() > most {
        let end = (0..=most).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_markdown_is_cut_between_blocks_with_a_note() {
        let blocks: Vec<String> = (0..10).map(|n| format!("- block number {n}\n")).collect();
        let whole = cut("head\n".into(), &blocks, 1000);
        assert!(whole.ends_with("- block number 9\n"));
        for most in 0..whole.len() {
            let text = cut("head\n".into(), &blocks, most);
            assert!(text.len() <= most, "{most}: {}", text.len());
        }
        let text = cut("head\n".into(), &blocks, 120);
        assert!(
            text.starts_with("head\n- block number 0\n") && text.contains("more: `abide plan`"),
            "{text}"
        );
    }
}
