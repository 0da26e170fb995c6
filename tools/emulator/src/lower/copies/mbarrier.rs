//! `mbarrier`: barriers in shared memory that also count bytes.

use super::phase::{Barrier, undefined};
use super::{Address, Scope, Target, addresses, in_shared, only, shared_or_any};
use crate::machine::{Action, Arrival, Block, Fault, Mask, Source, Step, Warp};
use crate::ptx::{Instruction, Space};

/// The number of unsuccessful queries in a row after which the emulator reports a deadlock.
const PATIENCE: u32 = 1 << 16;

fn load(
    warp: &Warp,
    block: &mut Block<'_>,
    lane: usize,
    address: u64,
) -> Result<(Barrier, u64), Fault> {
    let mut bytes = [0; 8];
    block.read(warp, lane, Space::Shared, address, &mut bytes)?;
    let bits = u64::from_le_bytes(bytes);
    Ok((Barrier::of(bits)?, bits))
}

fn save(
    warp: &mut Warp,
    block: &mut Block<'_>,
    lane: usize,
    address: u64,
    bits: u64,
) -> Result<(), Fault> {
    block.write(warp, lane, Space::Shared, address, &bits.to_le_bytes())
}

/// Changes a barrier, and returns its old bits.
pub(super) fn change(
    warp: &mut Warp,
    block: &mut Block<'_>,
    lane: usize,
    address: u64,
    change: MbarrierOp,
) -> Result<u64, Fault> {
    let (mut barrier, before) = load(warp, block, lane, address)?;
    match change {
        MbarrierOp::Announce => barrier.announce()?,
        MbarrierOp::Expect(bytes) => barrier.expect(bytes)?,
        MbarrierOp::Arrive {
            count,
            expect,
            drop,
            hold,
        } => {
            barrier.expect(expect)?;
            barrier.arrive(count)?;
            if drop {
                barrier.expected = barrier.expected.saturating_sub(count);
            }
            if hold && (barrier.pending, barrier.bytes) == (0, 0) {
                return Err(undefined(
                    "an arrival with .noComplete completes a phase".into(),
                ));
            }
            barrier.turn();
        }
        MbarrierOp::Complete(bytes) => {
            barrier.expect(-bytes)?;
            barrier.turn();
        }
    }
    block.asynchronous.polls = 0;
    save(warp, block, lane, address, barrier.bits())?;
    Ok(before)
}

/// An operation on a barrier.
#[derive(Clone, Copy, Debug)]
pub(super) enum MbarrierOp {
    /// One additional arrival is expected.
    Announce,
    /// Bytes are expected.
    Expect(i64),
    /// Bytes have arrived.
    Complete(i64),
    /// Threads have arrived.
    Arrive {
        /// The number of arrivals.
        count: u32,
        /// The number of bytes to expect before the arrival.
        expect: i64,
        /// Whether these threads drop out of later phases.
        drop: bool,
        /// Whether this arrival must not complete the phase.
        hold: bool,
    },
}

/// Executes the copies that a barrier waits for.
fn settle(warp: &mut Warp, block: &mut Block<'_>, lane: usize, address: u64) -> Result<(), Fault> {
    for arrival in block
        .asynchronous
        .arrivals
        .remove(&address)
        .unwrap_or_default()
    {
        let (pieces, what) = match arrival {
            Arrival::Thread(thread, end) => {
                let arrive = MbarrierOp::Arrive {
                    count: 1,
                    expect: 0,
                    drop: false,
                    hold: false,
                };
                (block.asynchronous.copies.of(thread).up_to(end), arrive)
            }
            Arrival::Bytes(pieces, bytes) => (pieces, MbarrierOp::Complete(bytes.into())),
        };
        pieces
            .iter()
            .try_for_each(|piece| block.perform(warp, lane, piece))?;
        change(warp, block, lane, address, what)?;
    }
    Ok(())
}

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Result<Action, String> {
    let known = [
        "b64",
        "shared",
        "shared::cta",
        "shared::cluster",
        "cta",
        "cluster",
    ];
    let order = [
        "release",
        "acquire",
        "relaxed",
        "parity",
        "expect_tx",
        "noComplete",
    ];
    let what = instruction.modifiers.first().map_or("", String::as_str);
    only(instruction, &[&known[..], &order, &[what]].concat())?;
    let space = shared_or_any(instruction);
    let value = |place, otherwise| match instruction.operands.get(place) {
        Some(_) => scope.at(instruction, place, "u32"),
        None => Ok(Source::Value(otherwise)),
    };
    let step = match what {
        "init" => initialise(space, scope.address(instruction, 0)?, value(1, 0)?),
        "inval" => invalidate(space, scope.address(instruction, 0)?),
        "expect_tx" | "complete_tx" => {
            let sign = if what == "expect_tx" { 1 } else { -1 };
            let count = value(1, 0)?;
            let make = move |count| match sign {
                1 => MbarrierOp::Expect(count),
                _ => MbarrierOp::Complete(count),
            };
            each(space, scope.address(instruction, 0)?, count, None, make)
        }
        "arrive" | "arrive_drop" => {
            let bytes = instruction.has("expect_tx");
            let (drop, hold) = (what == "arrive_drop", instruction.has("noComplete"));
            let make = move |value: i64| MbarrierOp::Arrive {
                count: if bytes { 1 } else { value as u32 },
                expect: if bytes { value } else { 0 },
                drop,
                hold,
            };
            let state = match instruction.operands.first() {
                Some(operand) => scope.target(operand)?,
                None => return Err("there are no operands".into()),
            };
            let state = match state {
                Target::Data(index, 64) => Some(index),
                Target::Sink => None,
                other => return Err(format!("{other:?} cannot hold a state")),
            };
            each(
                space,
                scope.address(instruction, 1)?,
                value(2, 1)?,
                state,
                make,
            )
        }
        "test_wait" | "try_wait" => return wait(instruction, scope, space),
        "pending_count" => {
            let ((target, _), state) =
                (scope.result(instruction)?, scope.at(instruction, 1, "u64")?);
            Box::new(move |warp: &mut Warp, mask: Mask, block: &mut Block<'_>| {
                let states = state.read(warp, block);
                for lane in mask.lanes() {
                    let pending = Barrier::of(states[lane])?.pending;
                    warp.registers[target][lane] = pending.into();
                }
                Ok(())
            })
        }
        _ => return Err(format!("mbarrier.{what}")),
    };
    Ok(Action::Step(step))
}

fn initialise(space: Space, address: Address, count: Source) -> Step {
    Box::new(move |warp, mask, block| {
        let (at, counts) = (addresses(address, warp, block), count.read(warp, block));
        for lane in mask.lanes() {
            let at = in_shared(lane, space, at[lane])?;
            if block.asynchronous.arrivals.contains_key(&at) {
                return Err(undefined(
                    "copies still arrive at an mbarrier that is made anew".into(),
                ));
            }
            save(warp, block, lane, at, Barrier::new(counts[lane])?.bits())?;
        }
        Ok(())
    })
}

fn invalidate(space: Space, address: Address) -> Step {
    Box::new(move |warp, mask, block| {
        let at = addresses(address, warp, block);
        for lane in mask.lanes() {
            let at = in_shared(lane, space, at[lane])?;
            load(warp, block, lane, at)?;
            save(warp, block, lane, at, 0)?;
        }
        Ok(())
    })
}

/// Returns a step that changes a barrier for each lane in turn. `state` is the register for the old bits.
fn each(
    space: Space,
    address: Address,
    count: Source,
    state: Option<usize>,
    make: impl Fn(i64) -> MbarrierOp + Send + Sync + 'static,
) -> Step {
    Box::new(move |warp, mask, block| {
        let (at, counts) = (addresses(address, warp, block), count.read(warp, block));
        for lane in mask.lanes() {
            let at = in_shared(lane, space, at[lane])?;
            let count = i64::from(counts[lane] as u32);
            let before = change(warp, block, lane, at, make(count))?;
            if let Some(state) = state {
                warp.registers[state][lane] = before;
            }
        }
        Ok(())
    })
}

/// Lowers `test_wait` and `try_wait`, which query whether a phase has ended. Other warps get a turn in both cases.
fn wait(instruction: &Instruction, scope: &Scope<'_>, space: Space) -> Result<Action, String> {
    let target = match instruction
        .operands
        .first()
        .map(|operand| scope.target(operand))
    {
        Some(Ok(Target::Predicate(index))) => index,
        other => return Err(format!("expected a predicate, found {other:?}")),
    };
    let address = scope.address(instruction, 1)?;
    let parity = instruction.has("parity");
    let phase = scope.at(instruction, 2, if parity { "u32" } else { "u64" })?;
    Ok(Action::Yield(Box::new(move |warp, mask, block| {
        let (at, phases) = (addresses(address, warp, block), phase.read(warp, block));
        for lane in mask.lanes() {
            let at = in_shared(lane, space, at[lane])?;
            settle(warp, block, lane, at)?;
            let barrier = load(warp, block, lane, at)?.0;
            let phase = match parity {
                true if phases[lane] > 1 => {
                    return Err(undefined(format!("a phase of parity {}", phases[lane])));
                }
                true => phases[lane],
                false => Barrier::of(phases[lane])?.parity,
            };
            let ended = barrier.parity != phase;
            if ended {
                block.asynchronous.polls = 0;
            }
            warp.predicates[target] &= !(1 << lane);
            warp.predicates[target] |= u32::from(ended) << lane;
            if !ended && mask.0 >> lane == 1 {
                impatient(block, at, barrier)?;
            }
        }
        Ok(())
    })))
}

fn impatient(block: &mut Block<'_>, address: u64, barrier: Barrier) -> Result<(), Fault> {
    block.asynchronous.polls += 1;
    if block.asynchronous.polls < PATIENCE {
        Ok(())
    } else {
        Err(Fault::Deadlock(format!(
            "the mbarrier at {address:#x} waits in vain for {} of {} arrivals and {} bytes",
            barrier.pending, barrier.expected, barrier.bytes
        )))
    }
}
