//! Runs a few lines of PTX over a buffer, for tests.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::lower::{Unsupported, lower};
use crate::machine::{Action, Counts, Failure, Lanes, Launch, Program, run};
use crate::memory::Memory;
use crate::ptx::{Register, parse};

/// Returns the program of a kernel with this body. The parameters are `.u64 data` and `.u32 count`. The registers are
/// `%p<16>`, `%h<32>` (16 bits), `%r<64>`, `%f<64>` (32 bits) and `%d<64>` (64 bits of any type). `%data` contains
/// the address of the buffer.
pub(crate) fn kernel(body: &str) -> Program {
    let text = format!(
        ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry tested(.param .u64 data, .param .u32 count)\n{{\n\
         .reg .pred %p<16>;\n.reg .b16 %h<32>;\n.reg .b32 %r<64>;\n.reg .f32 %f<64>;\n.reg .b64 %d<64>;\n\
         .reg .b64 %data;\nld.param.u64 %data, [data];\n{body}\nret;\n}}\n"
    );
    let module = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    lower(&module, &module.kernels[0], &HashMap::new()).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs one block of `threads` threads on a buffer that contains `bytes`. Returns the changed bytes.
pub(crate) fn run_on(
    program: &Program,
    threads: u32,
    bytes: &mut [u8],
) -> Result<Counts, Box<Failure>> {
    run_blocks(program, [1, 1, 1], [threads, 1, 1], bytes)
}

/// Runs like [`run_on`], with a grid.
pub(crate) fn run_blocks(
    program: &Program,
    grid: [u32; 3],
    block: [u32; 3],
    bytes: &mut [u8],
) -> Result<Counts, Box<Failure>> {
    run_with(
        program,
        grid,
        block,
        bytes,
        crate::machine::Options::default(),
    )
}

/// Runs like [`run_blocks`], with options.
pub(crate) fn run_with(
    program: &Program,
    grid: [u32; 3],
    block: [u32; 3],
    bytes: &mut [u8],
    options: crate::machine::Options,
) -> Result<Counts, Box<Failure>> {
    let memory = Memory::default();
    let data = memory
        .allocate(bytes.len(), u64::MAX)
        .expect("there is memory");
    // SAFETY: the memory was just allocated with this length.
    let buffer = unsafe { std::slice::from_raw_parts_mut(data as *mut u8, bytes.len()) };
    buffer.copy_from_slice(bytes);
    let mut parameters = data.to_le_bytes().to_vec();
    parameters.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    let outcome = run(&Launch {
        program,
        grid,
        block,
        parameters: &parameters,
        dynamic_shared: 0,
        memory: &memory.snapshot(),
        options,
    });
    bytes.copy_from_slice(buffer);
    memory.free(data);
    outcome
}

/// Checks that instructions compute `expected` for each case. The numbers of a case are in the registers `inputs`,
/// and the result is in `output`.
#[track_caller]
pub(crate) fn compare<const N: usize>(
    body: &str,
    inputs: [&str; N],
    output: &str,
    cases: impl IntoIterator<Item = [u64; N]>,
    expected: impl Fn([u64; N]) -> u64,
) {
    let evaluate = registers(body, [output]);
    let cases: Vec<_> = cases.into_iter().collect();
    assert!(!cases.is_empty());
    for cases in cases.chunks(32) {
        let lanes: [Lanes; N] = std::array::from_fn(|input| {
            std::array::from_fn(|lane| cases[lane % cases.len()][input])
        });
        let named: Vec<_> = inputs.into_iter().zip(&lanes).collect();
        let [results] = evaluate(&named);
        for (case, result) in cases.iter().zip(results) {
            let expected = expected(*case);
            assert!(
                result == expected,
                "{body} of {case:#x?} is {result:#x}, not {expected:#x}"
            );
        }
    }
}

/// Returns the reason why instructions are refused.
pub(crate) fn refusal(body: &str) -> String {
    match lowered(body) {
        Ok(_) => panic!("{body} was lowered"),
        Err(error) => error.what,
    }
}

/// Returns all pairs of these numbers, and `count` random pairs.
pub(crate) fn pairs(numbers: &[u64], count: usize, random: &mut Random) -> Vec<[u64; 2]> {
    let all = numbers
        .iter()
        .flat_map(|a| numbers.iter().map(|b| [*a, *b]));
    let more = (0..count).map(|_| [random.next(), random.next()]);
    all.chain(more).collect()
}

/// Runs instructions on registers only. The lanes of the inputs are written to the named registers, and the lanes of
/// `outputs` are returned, with predicates as 0 and 1. The registers are the registers of [`kernel`], and `%q<4>` with
/// 128 bits. Only the lower half of `%q` is returned.
pub(crate) fn registers<'a, const N: usize>(
    body: &'a str,
    outputs: [&'a str; N],
) -> impl Fn(&[(&str, &Lanes)]) -> [Lanes; N] + use<'a, N> {
    let (program, known) = lowered(body).unwrap_or_else(|error| panic!("{error}"));
    let program = Mutex::new(program);
    move |inputs| {
        let mut program = program.lock();
        let inputs: Vec<_> = inputs
            .iter()
            .map(|(name, lanes)| (known[*name], **lanes))
            .collect();
        let results = Arc::new(Mutex::new([[0; 32]; N]));
        let (outputs, out) = (outputs.map(|name| known[name]), results.clone());
        let last = program.ops.len() - 2;
        program.ops[0].action = Action::Step(Box::new(move |warp, _, _| {
            inputs.iter().for_each(|(register, lanes)| match register {
                Register::Data { index, width } => {
                    let ones = u64::MAX >> (64 - (*width).min(64));
                    warp.registers[*index] = lanes.map(|value| value & ones);
                }
                Register::Predicate(index) => {
                    let lanes = lanes.iter().rev();
                    warp.predicates[*index] = lanes.fold(0, |all, one| all << 1 | *one as u32 & 1);
                }
            });
            Ok(())
        }));
        program.ops[last].action = Action::Step(Box::new(move |warp, _, _| {
            *out.lock() = outputs.map(|register| match register {
                Register::Data { index, .. } => warp.registers[index],
                Register::Predicate(index) => {
                    std::array::from_fn(|lane| u64::from(warp.predicates[index] >> lane & 1))
                }
            });
            Ok(())
        }));
        run(&Launch {
            program: &program,
            grid: [1, 1, 1],
            block: [32, 1, 1],
            parameters: &[],
            dynamic_shared: 0,
            memory: &Memory::default().snapshot(),
            options: crate::machine::Options::default(),
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
        let results = results.lock();
        *results
    }
}

/// Returns a program with a fence before and a fence behind the body, where values are written and read.
fn lowered(body: &str) -> Result<(Program, HashMap<String, Register>), Box<Unsupported>> {
    let text = format!(
        ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry tested()\n{{\n\
         .reg .pred %p<16>;\n.reg .b16 %h<32>;\n.reg .b32 %r<64>;\n.reg .f32 %f<64>;\n.reg .b64 %d<64>;\n\
         .reg .b128 %q<4>;\nfence;\n{body}\nfence;\n}}\n"
    );
    let module = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let kernel = &module.kernels[0];
    let program = lower(&module, kernel, &HashMap::new())?;
    Ok((program, kernel.registers.clone()))
}

/// A generator of reproducible numbers.
pub(crate) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number of SplitMix64.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Returns an f32 of random bits. Exponents near the exponent of 1 are more frequent.
    pub fn single(&mut self) -> f32 {
        let bits = self.next();
        let any = f32::from_bits(bits as u32);
        match bits >> 32 & 3 {
            0 => any,
            _ => f32::from_bits(bits as u32 & 0x83ff_ffff | 0x3c00_0000),
        }
    }

    /// Returns an f64 like [`single`](Self::single). Most numbers are in the range of f32, and some are beyond it.
    pub fn double(&mut self) -> f64 {
        let bits = self.next();
        let any = f64::from_bits(bits);
        match bits >> 5 & 7 {
            0 => any,
            1 => any.abs().sqrt().sqrt().sqrt(),
            2 => f64::from(f32::from_bits(bits as u32)),
            _ => f64::from_bits(bits & 0x807f_ffff_ffff_ffff | 0x3f80_0000_0000_0000),
        }
    }
}

/// Returns numbers at which behaviour changes, and their neighbours.
pub(crate) fn singles() -> Vec<f32> {
    let mut all = vec![
        0.0,
        f32::INFINITY,
        f32::NAN,
        f32::MAX,
        f32::from_bits(1),
        f32::from_bits(0x7f80_0001),
    ];
    let centres = [
        f32::MIN_POSITIVE,
        1.0,
        0.5,
        1.5,
        2.5,
        3.5,
        127.5,
        128.0,
        255.5,
        32767.5,
        32768.0,
        65504.0,
        65519.99,
        65520.0,
        65535.5,
        65536.0,
        16_777_216.0,
        2_147_483_648.0,
        4_294_967_296.0,
        9.223_372e18,
        1.844_674_4e19,
        3.389_531_4e38,
        3.396e38,
        2f32.powi(-14),
        2f32.powi(-24),
        2f32.powi(-25),
        2f32.powi(-133),
        2f32.powi(-134),
        448.0,
        464.0,
        57344.0,
        61440.0,
        126.0,
    ];
    for centre in centres {
        all.extend([centre, f32::next_up(centre), f32::next_down(centre)]);
    }
    let negative: Vec<_> = all.iter().map(|number| -number).collect();
    all.extend(negative);
    all
}
