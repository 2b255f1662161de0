import torch, time, sys, json, warnings
import penstock
from penstock import Prefetch, UVA, Budget
from penstock.bench.decoder import *
from penstock.bench.measure import *
from penstock.store.pinned import pinned_region, device_view
dev=torch.device("cuda",0)
which=sys.argv[1:]
def ms(f,n=10):
    t=time_cuda(f,n); t.sort(); return t[len(t)//2]
with torch.no_grad():
  if "moe" in which:
    from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
    E,H,I,K=64,2048,1408,6
    def host(shape):
        n=torch.Size(shape).numel()*2
        r=pinned_region(n); t=torch.randn(shape,device=dev,dtype=torch.bfloat16)*0.02
        r.copy_(t.view(torch.uint8).reshape(-1).cpu()); v=device_view(r,dev).view(torch.bfloat16).view(shape)
        return t,v
    gu,guv=host((E,2*I,H)); dn,dnv=host((E,H,I))
    class X(torch.nn.Module):
        def __init__(s,g,d): 
            super().__init__(); s.gate_up_proj=torch.nn.Parameter(g,requires_grad=False); s.down_proj=torch.nn.Parameter(d,requires_grad=False); s.num_experts=E; s.has_gate=True; s.has_bias=False; s.is_transposed=False; s.act_fn=torch.nn.functional.silu
        def _apply_gate(s,x): g,u=x.chunk(2,-1); return s.act_fn(g)*u
    r,u=X(gu,dn),X(guv,dnv)
    for B in (1,4,16):
        x=torch.randn(B,H,device=dev,dtype=torch.bfloat16); idx=torch.stack([torch.randperm(E)[:K] for _ in range(B)]).to(dev); w=torch.rand(B,K,device=dev)
        uniq=idx.unique().numel()
        for name,f in (("batched",batched_mm_experts_forward),("grouped",grouped_mm_experts_forward)):
            try:
                a=f(r,x,idx,w); b=f(u,x,idx,w); torch.cuda.synchronize()
                t=ms(lambda: f(u,x,idx,w)); tr=ms(lambda: f(r,x,idx,w))
                print("moe",B,name,"equal",torch.equal(a,b),"uva ms",round(t,3),"resident ms",round(tr,3),"unique GB/s",round(uniq*3*H*I*2/t/1e6,1),"total GB/s",round(B*K*3*H*I*2/t/1e6,1),flush=True)
            except Exception as e: print("moe",B,name,repr(e)[:300],flush=True)
        a=batched_mm_experts_forward(r,x,idx,w); b=grouped_mm_experts_forward(r,x,idx,w); print("batched vs grouped equal",torch.equal(a,b),(a-b).abs().max().item())
  if "qwen" in which:
    cfg=CONFIGS["qwen3-8b"]()
    t=time.time(); res=build_model(cfg,dev,dev); print("resident built",time.time()-t,flush=True)
    t=time.time(); m=build_model(cfg,"cpu",dev); print("cpu built",time.time()-t,flush=True)
    torch.cuda.synchronize(); base=torch.cuda.memory_allocated(); torch.cuda.reset_peak_memory_stats()
    inv=penstock.inventory.take_inventory(m)
    layer=sum(s.num_bytes for s in inv.storages if ".layers." in s.name)
    t=time.time(); h=penstock.offload(m,Budget(inv.num_bytes-int(0.25*layer)+int(0.6*layer/36),params=["layers"]),device=dev); print("offload",time.time()-t, "peak-plan MiB",(torch.cuda.max_memory_allocated()-base-h.plan.device_bytes)/2**20,flush=True)
    print(h.plan.moved_bytes/1e9,len(h.plan.units),h.plan.num_slots,[e.storage for e in h.plan.units[0].entries])
    t=time.time(); m2=build_model(cfg,"cpu",dev); h2=penstock.offload(m2,Prefetch(4,1,2,params=["layers"]),device=dev); print("group",time.time()-t,flush=True)
    rate=pinned_region(1<<30); slot=torch.empty(1<<30,dtype=torch.uint8,device=dev)
    for B in (1,16):
        s=dict(resident=DecodeStep(res,res,B,dev),even=DecodeStep(m,m,B,dev),group=DecodeStep(m2,m2,B,dev))
        outs={k:f().clone() for k,f in s.items()}
        tm=interleave({**s,"link":lambda: slot.copy_(rate,non_blocking=True)},3,5,time_cuda)
        link=(1<<30)/tm["link"].ms/1e6
        for k,hh in (("even",h),("group",h2)):
            fl=max(tm["resident"].ms,hh.plan.moved_bytes/link/1e6)
            print("qwen eager",B,k,"equal",torch.equal(outs[k],outs["resident"]),"ms",round(tm[k].ms,2),"floor",round(fl,2),"ratio",round(tm[k].ms/fl,4),"resident",round(tm["resident"].ms,2),"link",round(link,2),"misses",hh.stats().misses,flush=True)
    if "graph" in which:
      B=1
      for k,mm,hh in (("even",m,h),("group",m2,h2)):
        st=DecodeStep(mm,mm,B,dev); ref=DecodeStep(res,res,B,dev)().clone()
        for _ in range(2): st()
        torch.cuda.synchronize(); g=torch.cuda.CUDAGraph()
        with torch.cuda.graph(g): o=st()
        for _ in range(3): g.replay()
        print("qwen graph",k,"equal",torch.equal(o,ref),"ms",ms(g.replay,8),"floor",hh.plan.moved_bytes/link/1e6, "eager after",torch.equal(st(),ref),flush=True)
    if "compile" in which:
      B=1
      torch._dynamo.reset()
      t=time.time(); c=torch.compile(m,fullgraph=True,dynamic=False); st=DecodeStep(m,c,B,dev); o=st().clone(); o2=st().clone(); print("compile offloaded",time.time()-t,torch.equal(o,o2),flush=True)
      print(dict(torch._dynamo.utils.counters["graph_break"]))
      tt=ms(st,10); print("compiled ms",tt,"floor",h.plan.moved_bytes/link/1e6,"ratio",tt/(h.plan.moved_bytes/link/1e6),"misses",h.stats().misses,flush=True)
      try:
        from penstock.testing import boundaries
        with boundaries(res,h.plan):
          torch._dynamo.reset(); t=time.time(); c=torch.compile(res,fullgraph=True,dynamic=False); st2=DecodeStep(res,c,B,dev); r=st2().clone(); print("compile reference",time.time()-t,"equal",torch.equal(r,o),flush=True)
          print("resident compiled ms",ms(st2,10))
      except ImportError as e: print(e)
