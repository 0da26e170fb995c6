//! Branches, barriers and exits.

use super::exchange::predicate;
use super::{Lowered, Scope, Target};
use crate::machine::{Action, Fault, Kind, Reduce, Wait};
use crate::ptx::{Instruction, Operand};

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let modifier = |name| instruction.has(name);
    let nothing = || Action::Step(Box::new(|_, _, _| Ok(())));
    let action = match instruction.name.as_str() {
        "bra" => Action::Jump(scope.label(operand(instruction, 0)?)?),
        "brx" if modifier("idx") => match operand(instruction, 1)? {
            Operand::Vector(labels) => Action::Table {
                index: scope.at(instruction, 0, "u32")?,
                targets: labels
                    .iter()
                    .map(|label| scope.label(label))
                    .collect::<Result<_, _>>()?,
            },
            other => return Err(format!("expected a list of labels, found {other:?}")),
        },
        "ret" | "exit" => Action::Exit,
        "bar" | "barrier" if modifier("cluster") => return Ok(None),
        "bar" | "barrier" if modifier("warp") => Action::Gather {
            members: scope.at(instruction, 0, "u32")?,
        },
        "bar" | "barrier" => barrier(instruction, scope)?,
        // Blocks run one after the other, and each block observes all earlier writes.
        "membar" | "fence" => nothing(),
        // These instructions are for debuggers and profilers.
        "brkpt" | "pmevent" => nothing(),
        // Gives other warps a turn. The duration has no effect.
        "nanosleep" => Action::Yield(Box::new(|_, _, _| Ok(()))),
        "trap" => Action::Step(Box::new(|_, _, _| {
            Err(Fault::Undefined("the kernel traps".into()))
        })),
        _ => return Ok(None),
    };
    Ok(Some((Kind::Control, action)))
}

/// `bar.sync a{, b}`, `bar.arrive a, b`, `bar.red.popc.u32 d, a{, b}, p`.
fn barrier(instruction: &Instruction, scope: &Scope<'_>) -> Result<Action, String> {
    let has = |name| instruction.has(name);
    let count = instruction.operands.len();
    let (first, last) = if has("red") {
        (1, count.saturating_sub(1))
    } else {
        (0, count)
    };
    let wait = match (has("sync"), has("arrive"), has("red")) {
        (true, false, false) => Wait::Sync,
        (false, true, false) => Wait::Arrive,
        (false, false, true) => {
            let (source, negated) = predicate(operand(instruction, last)?)?;
            let source = source.ok_or("it reduces no predicate")?;
            let target = scope.target(operand(instruction, 0)?)?;
            let reduce = match target {
                Target::Data(index, _) if has("popc") => Reduce::Count(index),
                Target::Predicate(index) if has("and") => Reduce::All(index),
                Target::Predicate(index) if has("or") => Reduce::Any(index),
                _ => return Err("the result is of another kind".into()),
            };
            Wait::Reduce(reduce, source, negated)
        }
        _ => return Err("is not known here".into()),
    };
    Ok(Action::Barrier {
        number: scope.at(instruction, first, "u32")?,
        threads: if first + 1 < last {
            Some(scope.at(instruction, first + 1, "u32")?)
        } else {
            None
        },
        wait,
    })
}

fn operand(instruction: &Instruction, place: usize) -> Result<&Operand, String> {
    let operand = instruction.operands.get(place);
    operand.ok_or_else(|| format!("operand {place} is missing"))
}
