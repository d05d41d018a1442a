"""Functions of LLVM's runtime library, compiler-rt, for targets where it is not linked: operations that the processor lacks."""

_MULTI3 = """\
define hidden void @__multi3(ptr %out, i64 %a, i64 %a.high, i64 %b, i64 %b.high) {
  %a0 = and i64 %a, 4294967295
  %a1 = lshr i64 %a, 32
  %b0 = and i64 %b, 4294967295
  %b1 = lshr i64 %b, 32
  %p00 = mul i64 %a0, %b0
  %p01 = mul i64 %a0, %b1
  %p10 = mul i64 %a1, %b0
  %p11 = mul i64 %a1, %b1
  %c0 = lshr i64 %p00, 32
  %c1 = and i64 %p01, 4294967295
  %c2 = and i64 %p10, 4294967295
  %s0 = add i64 %c0, %c1
  %middle = add i64 %s0, %c2
  %carry = lshr i64 %middle, 32
  %h0 = lshr i64 %p01, 32
  %h1 = lshr i64 %p10, 32
  %s1 = add i64 %p11, %h0
  %s2 = add i64 %s1, %h1
  %s3 = add i64 %s2, %carry
  %x = mul i64 %a, %b.high
  %y = mul i64 %a.high, %b
  %s4 = add i64 %s3, %x
  %high = add i64 %s4, %y
  %low = mul i64 %a, %b
  store i64 %low, ptr %out
  %high.at = getelementptr i64, ptr %out, i64 1
  store i64 %high, ptr %high.at
  ret void
}
"""


def multi3_ir(triple: str) -> str:
    """The LLVM IR of `__multi3`, a product of 128 bits, which code for WebAssembly calls where it asks whether a product of sizes fits 64
    bits. To be compiled without optimisation, which would find the product of 128 bits in it again, and have it call itself."""
    return f'target triple = "{triple}"\n{_MULTI3}'
