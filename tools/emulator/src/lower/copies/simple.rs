//! `cp.async`: copies of 4, 8 or 16 bytes by each thread.

use super::mbarrier::{MbarrierOp, change};
use super::{Scope, addresses, aligned, in_shared, only, shared_or_any};
use crate::machine::{
    Action, Arrival, CopyChunk, CopyDirection, Fault, Kind, Mask, Source, Step, thread,
};
use crate::ptx::{Instruction, Operand, Register, Space};

pub(super) fn lower(
    instruction: &Instruction,
    scope: &Scope<'_>,
) -> Result<(Kind, Action), String> {
    let step: Step = match instruction.modifiers.get(1).map(String::as_str) {
        Some("commit_group") => Box::new(|warp, mask, block| {
            for lane in mask.lanes() {
                block.asynchronous.copies.of(thread(warp, lane)).commit();
            }
            Ok(())
        }),
        Some("wait_group") => {
            let pending = number(instruction, 0)?;
            Box::new(move |warp, mask, block| {
                mask.lanes()
                    .try_for_each(|lane| block.wait_copies(warp, lane, pending))
            })
        }
        Some("wait_all") => Box::new(|warp, mask, block| {
            mask.lanes().try_for_each(|lane| {
                block.asynchronous.copies.of(thread(warp, lane)).commit();
                block.wait_copies(warp, lane, 0)
            })
        }),
        Some("mbarrier") => arrive(instruction, scope)?,
        Some("ca" | "cg") => return Ok((Kind::Global, Action::Step(copy(instruction, scope)?))),
        other => return Err(format!("cp.async.{other:?}")),
    };
    Ok((Kind::Control, Action::Step(step)))
}

/// Returns the constant at an operand position.
pub(super) fn number(instruction: &Instruction, place: usize) -> Result<usize, String> {
    match instruction.operands.get(place) {
        Some(Operand::Integer(number)) if *number >= 0 => Ok(*number as usize),
        other => Err(format!("expected a number, found {other:?}")),
    }
}

/// Lowers `cp.async.mbarrier.arrive`.
fn arrive(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    only(
        instruction,
        &[
            "async",
            "mbarrier",
            "arrive",
            "noinc",
            "shared",
            "shared::cta",
            "b64",
        ],
    )?;
    let (space, address) = (shared_or_any(instruction), scope.address(instruction, 0)?);
    // Without `.noinc`, the barrier expects one additional arrival.
    let counted = instruction.has("noinc");
    Ok(Box::new(move |warp, mask, block| {
        let at = addresses(address, warp, block);
        for lane in mask.lanes() {
            let at = in_shared(lane, space, at[lane])?;
            let thread = thread(warp, lane);
            let end = block.asynchronous.copies.of(thread).issued();
            if !counted {
                change(warp, block, lane, at, MbarrierOp::Announce)?;
            }
            block.asynchronous.polls = 0;
            let arrivals = block.asynchronous.arrivals.entry(at).or_default();
            arrivals.push(Arrival::Thread(thread, end));
        }
        Ok(())
    }))
}

/// The number of bytes that are read. The remaining bytes become zeros.
#[derive(Clone, Copy)]
enum Read {
    All,
    /// The number of bytes in a register.
    Some(Source),
    /// No bytes if a predicate holds. The predicate may be negated.
    Unless(Source, bool),
}

fn copy(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let known = [
        "async",
        "ca",
        "cg",
        "shared",
        "shared::cta",
        "global",
        "L2::cache_hint",
    ];
    only(
        instruction,
        &[&known[..], &["L2::64B", "L2::128B", "L2::256B"]].concat(),
    )?;
    let (target, source) = (
        scope.address(instruction, 0)?,
        scope.address(instruction, 1)?,
    );
    let bytes = number(instruction, 2)?;
    if !matches!((bytes, instruction.has("cg")), (4 | 8, false) | (16, _)) {
        return Err(format!("a copy of {bytes} bytes"));
    }
    let hint = usize::from(instruction.has("L2::cache_hint"));
    let read = match instruction
        .operands
        .get(3..instruction.operands.len() - hint)
    {
        Some([Operand::Register(Register::Predicate(index))]) => {
            Read::Unless(Source::Predicate(*index), false)
        }
        Some([Operand::Not(index)]) => Read::Unless(Source::Predicate(*index), true),
        Some([_]) => Read::Some(scope.at(instruction, 3, "u32")?),
        Some([]) => Read::All,
        _ => return Err("too many operands".into()),
    };
    Ok(Box::new(move |warp, mask, block| {
        let (to, from) = (
            addresses(target, warp, block),
            addresses(source, warp, block),
        );
        let sizes = match read {
            Read::All => [bytes as u64; _],
            Read::Some(source) => source.read(warp, block).map(|size| u64::from(size as u32)),
            Read::Unless(source, negated) => source.read(warp, block).map(|skip| {
                if (skip != 0) != negated {
                    0
                } else {
                    bytes as u64
                }
            }),
        };
        for lane in mask.lanes() {
            aligned(lane, Space::Shared, to[lane], bytes)?;
            aligned(lane, Space::Global, from[lane], bytes)?;
            let size = sizes[lane] as usize;
            if size > bytes {
                let what = format!("lane {lane} copies {size} of {bytes} bytes");
                return Err(Fault::Undefined(what));
            }
            let data = CopyChunk {
                way: CopyDirection::In,
                global: from[lane],
                shared: to[lane],
                bytes: size,
            };
            let rest = to[lane] + size as u64;
            let rest = CopyChunk {
                way: CopyDirection::Zero,
                global: 0,
                shared: rest,
                bytes: bytes - size,
            };
            for piece in [data, rest] {
                if piece.bytes > 0 {
                    block.check_piece(lane, &piece)?;
                    block.asynchronous.copies.of(thread(warp, lane)).push(piece);
                }
            }
        }
        block.count_shared(&to, mask, bytes);
        let read = mask.lanes().filter(|lane| sizes[*lane] > 0);
        let read = Mask(read.fold(0, |all, lane| all | 1 << lane));
        if read.count() > 0 {
            block.count_global(&from, read, bytes, false);
        }
        Ok(())
    }))
}
