//! Runs the blocks of a grid.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use super::block::BlockScratch;
use super::warp::{Warp, WarpStop};
use super::{Block, Counts, Failure, Fault, FaultLocation, Kind, LANES, Options, Program};
use crate::memory::Snapshot;

/// The number of blocks that a host thread takes at a time.
const CHUNK: u64 = 8;

/// A kernel with its arguments.
pub struct Launch<'a> {
    /// The program to run.
    pub program: &'a Program,
    /// The numbers of blocks, by dimension.
    pub grid: [u32; 3],
    /// The numbers of threads of a block, by dimension.
    pub block: [u32; 3],
    /// The arguments, in the layout of the program's parameters.
    pub parameters: &'a [u8],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: usize,
    /// The global memory.
    pub memory: &'a Snapshot,
    /// The options.
    pub options: Options,
}

impl Launch<'_> {
    /// Returns the number of threads of a block.
    pub(super) fn threads(&self) -> usize {
        self.block.iter().map(|size| *size as usize).product()
    }

    fn blocks(&self) -> u64 {
        self.grid.iter().map(|size| u64::from(*size)).product()
    }

    /// Returns the position of a block with this number. The first dimension varies fastest.
    fn position(&self, number: u64) -> [u32; 3] {
        let [x, y, _] = self.grid.map(u64::from);
        [number % x, number / x % y, number / (x * y)].map(|place| place as u32)
    }

    /// Returns the number of host threads that may run the launch.
    fn workers(&self) -> usize {
        let shared = |text: &str| text.contains(".shared");
        let mut ops = self.program.ops.iter();
        let ordered = ops.any(|op| op.kind == Kind::Atomic && !shared(&op.text));
        let chunks = self.blocks().div_ceil(CHUNK);
        if ordered || self.options.checks.conflicts {
            1
        } else {
            self.options.threads.clamp(1, chunks.max(1) as usize)
        }
    }
}

/// Runs a grid. The bits of the result do not depend on the number of host threads.
///
/// # Errors
///
/// Returns the fault and the location of the first block that fails.
pub fn run(launch: &Launch<'_>) -> Result<Counts, Box<Failure>> {
    let next = AtomicU64::new(0);
    // Blocks from this number on are not needed, since an earlier block has failed.
    let end = AtomicU64::new(launch.blocks());
    let ran = match launch.workers() {
        1 => vec![some_blocks(launch, &next, &end)],
        workers => thread::scope(|scope| {
            let run = || some_blocks(launch, &next, &end);
            let workers: Vec<_> = (0..workers).map(|_| scope.spawn(run)).collect();
            let join = |worker: thread::ScopedJoinHandle<'_, Ran>| match worker.join() {
                Ok(ran) => ran,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            workers.into_iter().map(join).collect()
        }),
    };
    let mut counts = Counts::default();
    let mut ledger = None;
    let mut failed: Option<(u64, Box<Failure>)> = None;
    for ran in ran {
        counts.add(&ran.counts);
        match &mut ledger {
            None => ledger = Some(ran.work.ledger),
            Some(ledger) => ledger.merge(ran.work.ledger),
        }
        let first = |number| failed.as_ref().is_none_or(|(other, _)| number < *other);
        if let Some((number, failure)) = ran.failed
            && first(number)
        {
            failed = Some((number, failure));
        }
    }
    counts.touched_sectors = ledger.map(|ledger| ledger.touched()).unwrap_or_default();
    match failed {
        Some((_, failure)) => Err(failure),
        None => Ok(counts),
    }
}

/// The results of a host thread.
struct Ran {
    counts: Counts,
    work: BlockScratch,
    failed: Option<(u64, Box<Failure>)>,
}

fn some_blocks(launch: &Launch<'_>, next: &AtomicU64, end: &AtomicU64) -> Ran {
    let mut ran = Ran {
        counts: Counts::default(),
        work: BlockScratch::new(launch),
        failed: None,
    };
    loop {
        let first = next.fetch_add(CHUNK, Ordering::Relaxed);
        for number in first..first + CHUNK {
            if number >= end.load(Ordering::Relaxed) {
                return ran;
            }
            match run_block(launch, launch.position(number), &mut ran.work) {
                Ok(counts) => ran.counts.add(&counts),
                Err(failure) => {
                    // Only earlier blocks are needed now. They run to their end.
                    end.fetch_min(number, Ordering::Relaxed);
                    ran.failed = Some((number, failure));
                    return ran;
                }
            }
        }
    }
}

fn run_block(
    launch: &Launch<'_>,
    position: [u32; 3],
    work: &mut BlockScratch,
) -> Result<Counts, Box<Failure>> {
    let program = launch.program;
    let mut block = Block::new(launch, position, work);
    let mut warps: Vec<_> = (0..launch.threads().div_ceil(LANES))
        .map(|number| Warp::new(number, launch.block, program))
        .collect();
    let mut before = 0;
    loop {
        let (mut done, mut turn, mut instructions) = (true, false, 0);
        for warp in &mut warps {
            let stop = warp.run(program, &mut block);
            let stop = stop.map_err(|fault| failure(program, position, warp, fault))?;
            done &= stop == WarpStop::Done;
            turn |= stop == WarpStop::Turn;
            instructions += warp.clock;
        }
        if done {
            if let Some(warp) = warps.first_mut() {
                let ended = block.end(warp);
                ended.map_err(|fault| failure(program, position, warp, fault))?;
            }
            let clocks = warps.iter().map(|warp| warp.clock);
            block.counts.longest_warp = clocks.max().unwrap_or_default();
            return Ok(block.counts);
        }
        if instructions > launch.options.budget {
            let fault = Fault::Endless(instructions);
            return Err(failure(program, position, left(&warps), fault));
        }
        if !turn && instructions == before {
            let fault = stuck(&warps, &block);
            return Err(failure(program, position, left(&warps), fault));
        }
        before = instructions;
    }
}

/// Returns a warp that has not ended.
fn left(warps: &[Warp]) -> &Warp {
    let left = warps.iter().find(|warp| warp.alive().0 != 0);
    left.unwrap_or(&warps[0])
}

fn stuck(warps: &[Warp], block: &Block<'_>) -> Fault {
    let program = block.launch.program;
    let waiting = warps.iter().flat_map(|warp| {
        warp.waiting().map(move |(number, at, mask)| {
            format!(
                "lanes {:#010x} of warp {} at barrier {number}, line {}",
                mask.0, warp.number, program.ops[at].line
            )
        })
    });
    let waiting: Vec<_> = waiting.collect();
    Fault::Deadlock(format!(
        "{} threads are left, and no barrier has all it waits for: {}",
        block.barriers.alive(),
        waiting.join("; ")
    ))
}

fn failure(program: &Program, block: [u32; 3], warp: &Warp, fault: Fault) -> Box<Failure> {
    let op = &program.ops[warp.at];
    Box::new(Failure {
        fault,
        place: FaultLocation {
            kernel: program.name.clone(),
            line: op.line,
            instruction: op.text.clone(),
            block,
            warp: warp.number,
        },
    })
}
