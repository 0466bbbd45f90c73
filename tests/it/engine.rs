//! The engine as a library: an apply without the command line.

use crate::apply::Machine;

#[allow(dead_code)] // its main
#[path = "../../examples/apply.rs"]
mod example;

#[test]
fn the_library_applies_a_directory() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    // A verb that starts the local system, and changes nothing.
    let (code, _, err) = machine.run(&["resume"]);
    assert_eq!(code, 0, "{err}");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let apply = || {
        let home = machine.path(".abide-home");
        runtime.block_on(example::apply_directory(machine.path("m"), &home)).expect("a report")
    };
    let first = apply();
    assert_eq!(first.converged, Some(true), "{first:?}");
    assert!(!first.ended.is_empty(), "{first:?}");
    assert_eq!(machine.effects(), ["start a 1"]);
    let second = apply();
    assert_eq!((second.converged, second.ended.len()), (Some(true), 0), "{second:?}");
    let (code, out, err) = machine.run(&["history"]);
    // A heading and one run.
    assert!(code == 0 && out.lines().count() == 2, "{out} {err}");
}
