use super::*;

/// A copy of 16 bytes: an index, two addresses, a load and a store.
const COPY: &str = "\
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R0, SR_TID.X ;
        /*0020*/                   LDC.64 R2, c[0x0][0x210] ;
        /*0030*/                   LDC.64 R8, c[0x0][0x218] ;
        /*0040*/                   IMAD.WIDE.U32 R2, R0, 0x10, R2 ;
        /*0050*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0060*/                   IMAD.WIDE.U32 R8, R0, 0x10, R8 ;
        /*0070*/                   STG.E.128 desc[UR4][R8.64], R4 ;
        /*0080*/                   EXIT ;
.L_x_0:
        /*0090*/                   BRA `(.L_x_0);
";

const LAUNCH: LaunchShape = LaunchShape {
    units: 256,
    registers: 32,
    shared: 0,
};

/// A GPU whose copy moves 1 byte per clock and multiprocessor, and whose memory latency is 1000
/// clocks.
const SLOW: GpuSpec = GpuSpec {
    arch: "",
    multiprocessors: 10.0,
    clock: 1e9,
    copy: 1e10,
    tensor: 1e13,
    latency: 1e-6,
    parameters: 0x210,
};

fn of(listing: &str, cached: &[u32]) -> Bound {
    bound(&MachineCode::parse(listing), LAUNCH, cached, &SLOW).unwrap()
}

/// Returns a listing of `lines`. Lines that end with a colon are labels.
fn listing(lines: &[&str]) -> String {
    let line = |text: &&str| {
        if text.ends_with(':') {
            format!("{text}\n")
        } else {
            format!("        /*0000*/   {text} ;\n")
        }
    };
    lines.iter().map(line).collect()
}

#[test]
fn a_copy_is_bound_by_its_accesses_and_by_one_latency() {
    let bound = of(COPY, &[]);
    // Each of the 32 lanes moves 32 bytes. A load and a store of 512 bytes each take 8 clocks at 128 bytes per clock.
    // Issuing the 9 instructions takes only 9 / 4 clocks.
    assert_eq!((bound.work, bound.pipe), (32.0 * 32.0 / 8.0, Pipe::Lsu));
    // 64 planes move these bytes in 1000 clocks.
    assert_eq!((bound.planes, bound.waits, bound.bytes), (64, 1.0, 32.0));
    assert!((bound.wait - 64.0 * 32.0 * 32.0 / 1000.0).abs() < 1e-9);
}

#[test]
fn what_a_cache_has_is_neither_moved_nor_waited_for() {
    let bound = of(COPY, &[0]);
    assert_eq!((bound.bytes, bound.waits), (16.0, 0.0));
    assert_eq!(bound.wait, f64::INFINITY);
    assert_eq!(bound.work, 32.0 * 16.0 / 8.0);
    // The second pointer, and an index that the copy does not use.
    assert_eq!(of(COPY, &[1]).bytes, 16.0);
    assert_eq!(of(COPY, &[2]).bytes, 32.0);
}

#[test]
fn loads_that_are_issued_together_are_waited_for_together() {
    let together = listing(&[
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "LDG.E.128 R8, desc[UR4][R2.64+0x10]",
        "FADD R4, R7, R11",
        "STG.E.128 desc[UR4][R2.64], R4",
        "EXIT",
    ]);
    assert_eq!(of(&together, &[]).waits, 1.0);
    let apart = listing(&[
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "FADD R12, R7, R12",
        "LDG.E.128 R8, desc[UR4][R2.64+0x10]",
        "FADD R12, R11, R12",
        "STG.E.128 desc[UR4][R2.64], R4",
        "EXIT",
    ]);
    assert_eq!(of(&apart, &[]).waits, 2.0);
    // A store needs all four registers, and an address may come from memory.
    let stored = listing(&[
        "LDG.E R3, desc[UR4][R2.64]",
        "LDG.E.128 R4, desc[UR4][R3.64]",
        "MOV R5, R1",
        "LDG.E R23, desc[UR4][R2.64]",
        "STG.E.128 desc[UR4][R2.64], R20",
        "EXIT",
    ]);
    assert_eq!(of(&stored, &[]).waits, 3.0);
}

#[test]
fn a_loop_counts_and_not_the_code_around_it() {
    let around = listing(&[
        "LDG.E.128 R20, desc[UR4][R2.64]",
        "FADD R20, R20, R20",
        ".L_x_0:",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "@P1 BRA `(.L_x_1)",
        "MUFU.EX2 R4, R4",
        ".L_x_1:",
        "STG.E.128 desc[UR4][R2.64], R4",
        "@P0 BRA `(.L_x_0)",
        "EXIT",
    ]);
    let bound = of(&around, &[]);
    assert_eq!((bound.waits, bound.bytes), (1.0, 32.0));
    // The path with the exponential.
    assert_eq!(bound.path, [2, 3, 4, 5, 6]);
}

#[test]
fn the_cheapest_of_equal_ways_is_taken_and_the_slowest_loop_counts() {
    let two = listing(&[
        ".L_x_0:",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "@P1 BRA `(.L_x_1)",
        "LOP3.LUT R5, R5, R5, R5",
        "LOP3.LUT R5, R5, R5, R5",
        ".L_x_1:",
        "@P0 BRA `(.L_x_0)",
        ".L_x_2:",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "F2F.BF16.F32 R9, R5",
        "F2F.BF16.F32 R9, R5",
        "F2F.BF16.F32 R9, R5",
        "STG.E.128 desc[UR4][R2.64], R5",
        "@P0 BRA `(.L_x_2)",
        "EXIT",
    ]);
    let bound = of(&two, &[]);
    // The first loop moves 16 bytes in 4 clocks. The second loop moves 32 bytes. Its 3 conversions take 2 clocks
    // each, and its accesses take 8 clocks.
    assert_eq!((bound.work, bound.pipe), (32.0 * 32.0 / 8.0, Pipe::Lsu));
    // The first loop waits the same number of times for half of the bytes.
    assert_eq!((bound.waits, bound.bytes), (1.0, 16.0));
    let more = two.replacen("F2F", "MUFU", 2);
    let more = more.replacen(
        "F2F",
        "F2F.BF16.F32 R9, R5 ;\n        /*0000*/ F2F.BF16.F32 R9, R5 ;\n        /*0000*/ F2F",
        1,
    );
    let bound = of(&more, &[]);
    assert_eq!((bound.work, bound.pipe), (32.0 * 32.0 / 10.0, Pipe::Xu));
}

#[test]
fn rare_ways_are_not_taken() {
    let rare = |jump: &str| {
        listing(&[
            "LDG.E.128 R4, desc[UR4][R2.64]",
            jump,
            "LDG.E R8, desc[UR4][R2.64]",
            "POPC R8, R8",
            ".L_x_1:",
            "STG.E.128 desc[UR4][R2.64], R4",
            "EXIT",
        ])
    };
    for jump in [
        "@P1 BRA `(.L_x_1)",
        "BRA P2, `(.L_x_1)",
        "BRA.DIV UR4, `(.L_x_1)",
    ] {
        assert_eq!(of(&rare(jump), &[]).path, [0, 1, 4, 5]);
    }
    // An unconditional branch, and the reverse case: a branch to code behind the end that jumps back.
    assert_eq!(of(&rare("BRA `(.L_x_1)"), &[]).path, [0, 1, 4, 5]);
    let behind = listing(&[
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "BRA.DIV UR4, `(.L_x_2)",
        ".L_x_1:",
        "STG.E.128 desc[UR4][R2.64], R4",
        "EXIT",
        ".L_x_2:",
        "POPC R8, R8",
        "BRA `(.L_x_1)",
    ]);
    assert_eq!(of(&behind, &[]).path, [0, 1, 2, 3]);
}

#[test]
fn of_two_ways_the_cheaper_one_is_taken() {
    let two = listing(&[
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "@P1 BRA `(.L_x_1)",
        "POPC R8, R8",
        "POPC R8, R8",
        "BRA `(.L_x_2)",
        ".L_x_1:",
        "MOV R8, R8",
        ".L_x_2:",
        "STG.E.128 desc[UR4][R2.64], R4",
        "EXIT",
    ]);
    let code = MachineCode::parse(&two);
    let path = paths::main_path(&code, regions(&code)[0], |i| Pipe::Xu.quarters(&i.name));
    assert_eq!(path.unwrap(), [0, 1, 5, 6, 7]);
}

#[test]
fn of_loops_in_each_other_the_inner_one_counts() {
    let nested = listing(&[
        ".L_x_0:",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        ".L_x_1:",
        "LDG.E.128 R8, desc[UR4][R2.64]",
        "STG.E.128 desc[UR4][R2.64], R8",
        "@P0 BRA `(.L_x_1)",
        "@P1 BRA `(.L_x_0)",
        "EXIT",
    ]);
    assert_eq!(of(&nested, &[]).path, [1, 2, 3]);
}

#[test]
fn pointers_are_followed_through_registers() {
    let traffic = |lines: &[&str]| {
        let code = MachineCode::parse(&listing(lines));
        let traffic = code.traffic(&[1], SLOW.parameters).into_iter();
        traffic.map(|traffic| traffic.bytes).collect::<Vec<_>>()
    };
    let through = [
        "ULDC.64 UR6, c[0x0][0x218]",
        "IADD3 R2, P0, R9, UR6, RZ",
        "ISETP.GE.U32.AND P1, PT, R9, R2, PT",
        "LDG.E.128 R4, desc[UR4][R2.64+0x10]",
        // A loaded value is not treated as a pointer, even if it was loaded through a pointer.
        "LDG.E.64 R8, desc[UR4][R4.64]",
        // If this instruction is not executed, the register keeps the old pointer.
        "@P1 MOV R2, R20",
        "STG.E.U16 desc[UR4][R2.64], R4",
        "MOV R2, R20",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "LDG.E.128 R4, desc[UR4][R9.64]",
    ];
    assert_eq!(traffic(&through), [0, 0, 0, 0, 8, 0, 0, 0, 16, 16]);
}

#[test]
fn what_an_unrolled_loop_leaves_to_do_is_not_counted() {
    let rest = listing(&[
        ".L_x_0:",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "LDG.E.128 R8, desc[UR4][R2.64]",
        "FADD R4, R4, R8",
        "@P0 BRA `(.L_x_0)",
        ".L_x_1:",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "FADD R4, R4, R8",
        "@P0 BRA `(.L_x_1)",
        "EXIT",
    ]);
    assert_eq!(of(&rest, &[]).bytes, 32.0);
}

#[test]
fn planes_are_limited_by_whatever_runs_out_first() {
    let planes = |units, registers, shared| {
        let launch = LaunchShape {
            units,
            registers,
            shared,
        };
        launch.planes()
    };
    assert_eq!(planes(256, 32, 0), 64);
    // 33 registers are rounded up to 40. A quarter of the register file holds 12 planes, so there are 6 cubes of 8
    // planes.
    assert_eq!(planes(256, 33, 0), 48);
    assert_eq!(planes(1024, 64, 0), 32);
    assert_eq!(planes(1024, 40, 0), 32);
    assert_eq!(planes(128, 255, 0), 8);
    // 228 KiB hold three cubes of 75 KiB but not three cubes of 76 KiB. Each cube needs 1 KiB more.
    assert_eq!(planes(128, 32, 75 * 1024), 12);
    assert_eq!(planes(128, 32, 76 * 1024), 8);
    assert_eq!(planes(32, 16, 0), 32);
}

#[test]
fn each_instruction_is_on_its_documented_pipe() {
    let clocks = |pipe: Pipe, name: &str| pipe.quarters(name) as f64 / 4.0;
    assert_eq!(clocks(Pipe::Fma, "FFMA.SAT"), 0.25);
    assert_eq!(clocks(Pipe::Fma, "IMAD.WIDE.U32"), 0.5);
    assert_eq!(clocks(Pipe::FmaHeavy, "IMAD.WIDE.U32"), 0.5);
    assert_eq!(clocks(Pipe::FmaHeavy, "FFMA"), 0.0);
    assert_eq!(clocks(Pipe::Alu, "LOP3.LUT"), 0.5);
    assert_eq!(clocks(Pipe::Alu, "F2FP.BF16.F32.PACK_AB"), 0.5);
    assert_eq!(clocks(Pipe::Xu, "F2F.BF16.F32"), 2.0);
    assert_eq!(clocks(Pipe::Xu, "MUFU.EX2"), 2.0);
    assert_eq!(clocks(Pipe::Lsu, "LDG.E.128.CONSTANT"), 4.0);
    assert_eq!(clocks(Pipe::Lsu, "LDSM.16.M88.4"), 4.0);
    assert_eq!(clocks(Pipe::Lsu, "STS.64"), 2.0);
    assert_eq!(clocks(Pipe::Lsu, "LDG.E.U16"), 1.0);
    assert_eq!(clocks(Pipe::Issue, "BRA"), 0.25);
}

#[test]
fn a_kernel_that_moves_nothing_has_no_bound() {
    let nothing = listing(&["MOV R1, R2", "EXIT"]);
    assert_eq!(
        bound(&MachineCode::parse(&nothing), LAUNCH, &[], &SLOW),
        None
    );
}
